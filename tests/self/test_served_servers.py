"""Servers as sides: started, asked, resumed; and each bad one is one clear error that loses nothing."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonep_validate.errors import CaseError
from moonep_validate.served.answers import Answers, read
from moonep_validate.served.dialects import DIALECTS
from moonep_validate.served.recipe import Recipe, read_recipe
from moonep_validate.served.sides import Questions, answers_of
from moonep_validate.trace.schema import SchemaError
from tests.self import served_server
from tests.self.served_server import MODEL, VOCAB

pytest.importorskip("httpx", reason="servers need the extra `served`")
FAKE = served_server.__file__
QUESTIONS = Questions(8, 0, "", 60.0)
Cli = Callable[..., tuple[int, str, str]]


def recipe(folder: Path, fault: str = "", more: str = "", name: str = "side") -> str:
    command = json.dumps([sys.executable, FAKE, "{port}", fault])
    text = f'engine = "fake"\nmodel = "{MODEL}"\nvocab = {VOCAB}\nlongest = 64\ncommand = {command}\nready = 20\n{more}\n'
    path = folder / f"{name}{fault}.toml"
    path.write_text(text)
    return str(path)


def asked(folder: Path, fault: str = "", more: str = "", **arguments: Any) -> Answers:
    return answers_of(recipe(folder, fault, more), QUESTIONS, **arguments)


@pytest.mark.parametrize("dialect", ["openai", "sglang"])
def test_both_dialects_say_the_same(tmp_path: Path, dialect: str) -> None:
    found = asked(tmp_path, more=f'dialect = "{dialect}"')
    assert found.who.engine == "fake"
    assert found.who.version == "1.5"
    one = found.run("greedy")["short-0"]
    whole = served_server.continued(one.asked.tolist(), len(one.tokens))
    assert one.tokens.tolist() == whole[len(one.asked) :]
    assert one.logprobs[0] == served_server.logprob(whole[: len(one.asked) + 1])
    assert one.prompt_logprobs[1] == served_server.logprob(whole[:2])
    assert len(found.run("greedy")) == len(found.run("forced")) == len(found.run("again by threes")) == 8
    forced = found.run("forced")["short-0"]
    assert forced.logprobs.tolist() == one.logprobs.tolist()


def test_compare_of_two_servers(cli: Cli, tmp_path: Path) -> None:
    base, same = recipe(tmp_path), recipe(tmp_path, name="other", more='dtype = "float32"')
    code, out, err = cli("compare", base, same, "--prompts", "8")
    assert "8 identical" in out
    assert code == 0
    assert "8 prompts: a drift of" in err
    code, out, _ = cli("compare", base, recipe(tmp_path, "drift"), "--prompts", "8")
    assert code == 12  # nothing says how large noise is
    exact = 'dtype = "float32"'
    code, out, _ = cli("compare", same, recipe(tmp_path, "drift", exact), "--prompts", "8")
    assert code == 1
    assert "within 6.1e-05" in out


def test_power_says_how_many_prompts(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("compare", recipe(tmp_path), "--save", str(tmp_path / "x.jsonl"), "--power", "5")
    assert code == 0
    assert "14 prompts: a drift of" in err
    assert len(read(tmp_path / "x.jsonl").run("greedy")) == 14


def test_own_prompts(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"name": "a", "tokens": [9, 10, 11]}\n{"name": "b", "tokens": [12], "max_tokens": 3, "group": "g"}\n'
    )
    save = tmp_path / "x.jsonl"
    code, _, _ = cli("compare", recipe(tmp_path), "--prompts-file", str(own), "--save", str(save))
    assert code == 0
    found = read(save).run("greedy")
    assert {name: (one.group, len(one.tokens)) for name, one in found.items()} == {"a": ("own", 16), "b": ("g", 3)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompts"),
        ('{"name": "a"}', "line 1: lacks tokens"),
        (
            '{"name": "a", "tokens": [1]}\n{"name": "a", "tokens": [1]}',
            "line 2: prompt a: its name is there twice",
        ),
        ('{"name": "a", "tokens": []}', "at least one"),
        ('{"name": "a", "tokens": [-1]}', "ids from 0"),
        ('{"name": "a", "tokens": [1], "max_tokens": 0}', "max_tokens is 0, a whole number from 1"),
        ("no", "line 1: "),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, text: str, said: str) -> None:
    from moonep_validate.served.prompts import read_prompts

    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(CaseError) as error:
        read_prompts(path)
    assert said in str(error.value)


def test_drops_are_tried_again(tmp_path: Path) -> None:
    found = asked(tmp_path, "drops", "concurrency = 1")
    assert not [one for one in found.run("greedy").values() if one.error]


def test_what_died_in_the_middle_goes_on_later(cli: Cli, tmp_path: Path) -> None:
    save = tmp_path / "x.jsonl"
    dead = recipe(tmp_path, "dies", 'concurrency = 1\nenvironment = {MY_API_KEY = "sk-very-secret"}')
    base = recipe(tmp_path)
    code, out, _ = cli("compare", base, dead, "--prompts", "14", "--save", str(save))
    assert code == 1
    assert "ended with exit code 3" in out
    assert "about to die, key ***" in out
    assert "sk-very-secret" not in out + save.read_text()
    kept = [name for name, one in read(save).run("greedy").items() if not one.error]
    assert len(kept) == 10  # what was compared is kept
    # The same side, mended: it is asked for the rest only.
    Path(dead).write_text(Path(recipe(tmp_path)).read_text() + 'environment = {MY_API_KEY = "sk-very-secret"}\n')
    code, out, _ = cli("compare", base, dead, "--prompts", "14", "--save", str(save))
    assert code == 0
    assert "14 identical" in out
    assert len(read(save).run("greedy")) == 14


def test_known_answers_are_not_asked_again(tmp_path: Path) -> None:
    save = tmp_path / "x.jsonl"
    asked(tmp_path, save=save)
    whole = save.read_bytes()
    lines = whole.splitlines(keepends=True)
    save.write_bytes(b"".join(lines[:5]) + lines[5][:20])  # interrupted while a line was written
    told: list[tuple[int, int]] = []
    questions = Questions(8, 0, "", 60.0, tell=lambda done, total: told.append((done, total)))
    found = answers_of(recipe(tmp_path), questions, save=save)
    assert len(found.run("greedy")) == 8
    assert told[-1] == (24 - 4, 24)
    other = recipe(tmp_path, more='dtype = "float32"')
    with pytest.raises(CaseError, match=r"holds answers of fake 1\.5, tiny; this side is fake 1\.5 float32"):
        answers_of(other, questions, save=save)


SPOILED = {
    "nan": "NaN or infinite",
    "hole": "missing",
    "above": "at most 0, as logarithms of probabilities are",
    "misses": "is not listed, or with another log probability",
    "beyond": f"ids below the vocabulary's size of {VOCAB}",
}


@pytest.mark.parametrize(
    ("fault", "more", "said"),
    [
        ("half", "", "the connection broke"),
        ("malformed", "", "Expecting value"),
        ("hostile", "", "nested too deep"),
        ("other-tokenizer", "", "the server read other prompt tokens"),
        ("texts", "", "no id; the server must return token ids"),
        *(
            (fault, f'dialect = "{dialect}"', said)
            for dialect in sorted(DIALECTS)
            for fault, said in SPOILED.items()
        ),
    ],
)
def test_bad_answers_are_findings(cli: Cli, tmp_path: Path, fault: str, more: str, said: str) -> None:
    code, out, _ = cli("compare", recipe(tmp_path), recipe(tmp_path, fault, more), "--prompts", "3")
    assert code == 1
    assert said in out
    assert len(out) < 6000


def test_slow_answers_have_a_limit(cli: Cli, tmp_path: Path) -> None:
    slow = recipe(tmp_path, "slow", "timeout = 0.4\nconcurrency = 1")
    code, out, _ = cli("compare", recipe(tmp_path), slow, "--prompts", "8")
    assert code == 0  # tried again, it came
    assert "8 identical" in out


@pytest.mark.parametrize(
    ("fault", "more", "said"),
    [
        ("no-logprobs", "", "the answer has no log probabilities"),
        ("other-model", "", "the server serves other, the recipe says model = 'tiny'"),
        ("web-page", "", "is no server of the dialect openai"),
        ("never", "ready = 1", "not ready after 1 s (ready = …). The end of its log:\n  loading for ever"),
        ("not-ready", "ready = 1", "not ready after 1 s"),
        (
            "exits",
            'arguments = ["--api-key", "sk-very-secret"]',
            "exit code 7. The end of its log:\n  no GPU here, --api-key ***",
        ),
    ],
)
def test_bad_servers_are_one_error(cli: Cli, tmp_path: Path, fault: str, more: str, said: str) -> None:
    path = recipe(tmp_path, fault, more)
    if more.startswith("ready"):
        Path(path).write_text(Path(path).read_text().replace("ready = 20\n", ""))
    code, out, err = cli("compare", path, recipe(tmp_path))
    assert code == 4
    assert said in out + err
    assert "sk-very-secret" not in out + err


def test_port_taken(cli: Cli, tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        code, out, err = cli("compare", recipe(tmp_path, more=f"port = {port}"), recipe(tmp_path, name="other"))
    assert code == 4
    assert f"port {port} is taken" in out + err


def test_url_that_is_no_server(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("compare", "http://127.0.0.1:9", recipe(tmp_path))
    assert code == 4
    assert "http://127.0.0.1:9/v1/models is no server of the dialect openai: the connection broke" in out + err


def test_running_server_by_url_and_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from moonep_validate.served.server import running
    from moonep_validate.served.speakers.remote import ready

    served = read_recipe(Path(recipe(tmp_path, "key")))
    with running(served, lambda url: ready(served, url)) as server:
        text = (
            f'engine = "gateway"\nurl = "{server.url}"\nvocab = {VOCAB}\nlongest = 64\nkey_variable = "THE_KEY"\n'
        )
        path = tmp_path / "url.toml"
        path.write_text(text)
        with pytest.raises(CaseError, match="key_variable = THE_KEY: this variable is not set"):
            answers_of(str(path), QUESTIONS)
        monkeypatch.setenv("THE_KEY", "sk-very-secret")
        assert not [one for one in answers_of(str(path), QUESTIONS).run("greedy").values() if one.error]
        monkeypatch.setenv("THE_KEY", "sk-another-one")
        wrong = answers_of(str(path), QUESTIONS).run("greedy")["short-0"].error
        assert wrong.startswith("HTTP 401")
        assert "sk-another-one" not in wrong
    assert server.process.poll() is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('engine = "vllm"\nmodle = "x"', "has modle; known: arguments, command,"),
        ('model = "x"', "lacks engine"),
        ('engine = "vllm"', "model is missing"),
        ('engine = "vllm"\nmodel = "x"\nport = 70000', "port is 70000, a whole number from 0 to 65535"),
        ('engine = "vllm"\nmodel = "x"\nready = "x"', "ready is 'x', a number is needed"),
        ('engine = "vllm"\nmodel = "x"\nready = 0', "ready = 0: seconds above 0"),
        ('engine = "vllm"\nmodel = "x"\nranks = 2', "ranks = 2 is for in_process"),
        ('engine = "vllm"\nmodel = "x"\nconcurrency = 33', "from 1 to 32"),
        ('engine = "vllm"\nmodel = "x"\ndialect = "rest"', "one of , openai, sglang"),
        ('engine = "v"\nurl = "ftp://x"', "does not begin with http"),
        ('engine = "v"\nurl = "http://x"\ncommand = ["y"]', "url and command exclude each other"),
        ('engine = "v"\nurl = "http://x"\nexpects = "moonep"', "expects needs taps"),
        ("engine = ", "Invalid value"),
    ],
)
def test_wrong_recipes_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(CaseError) as error:
        read_recipe(path)
    assert str(error.value).startswith(f"recipe {path}: ")
    assert said in str(error.value)


def test_engines_have_commands() -> None:
    made = Recipe("vllm", "m", python="py", arguments=["--x"]).started_by(9)
    assert made[:5] == ["py", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
    assert made[5:] == ["--host", "127.0.0.1", "--port", "9", "--x"]
    with pytest.raises(CaseError, match="engine other has no server known here"):
        Recipe("other", "m").started_by(9)


def test_secrets_are_found_where_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefg")
    one = Recipe(
        "e",
        url="http://me:pass-word@h/?k=in-the-query",
        arguments=["--api-key", "argument1", "--auth-token=argument2", "--port", "123456"],
        environment={"X_SECRET": "variable1", "PLAIN": "harmless"},
        headers={"X": "header-value"},
    )
    text = "hf_abcdefg me:pass-word in-the-query argument1 argument2 variable1 header-value"
    assert one.hide(text) == "*** *** *** *** *** *** ***"
    assert one.hide("harmless 123456") == "harmless 123456"


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("answer", [None, [], {}, {"choices": [3]}, {"meta_info": {"output_token_logprobs": [3]}}])
def test_answers_of_another_form_are_refused(dialect: str, answer: Any) -> None:
    with pytest.raises(SchemaError):
        DIALECTS[dialect].said(answer, [1])


def test_nothing_is_left_running(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        f"import subprocess,sys; subprocess.run([sys.executable, {FAKE!r}, sys.argv[1]])",
    ]
    path = tmp_path / "nested.toml"
    text = f'engine = "fake"\nmodel = "{MODEL}"\nvocab = {VOCAB}\nlongest = 64\ncommand = {json.dumps([*command, "{port}"])}\n'
    path.write_text(text)
    from moonep_validate.served.server import running
    from moonep_validate.served.speakers.remote import ready

    served = read_recipe(path)
    with running(served, lambda url: ready(served, url)) as server:
        group = server.process.pid
    limit = time.monotonic() + 10
    while living(group) and time.monotonic() < limit:
        time.sleep(0.05)  # who kills does not wait for grandchildren
    assert not living(group)


def living(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
