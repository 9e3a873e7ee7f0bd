"""The grammar: one spelling per case, and errors that name the value, the limit and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonep_validate.cases import grammar
from moonep_validate.cases.case import Case, CaseError, Spec
from moonep_validate.cases.near import near
from moonep_validate.cases.vocabulary import VOCABULARY
from moonep_validate.faults import parse_fault

SMALL = "genB+R4+E8+K2+S9"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    R, per_rank = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    S = draw(st.integers(1, 40))
    generation = draw(st.sampled_from("AB"))
    routing = draw(
        st.sampled_from([Spec("uniform"), Spec("hot", (str(R * per_rank - 1),)), Spec("zipf", ("1.5",))])
    )
    return Case(
        generation=generation,
        R=R,
        E=R * per_rank,
        K=draw(st.integers(1, 32)),
        S=S,
        H=8 * draw(st.integers(1, 64)),
        I=draw(st.integers(1, 300)),
        slots=draw(st.none() | st.integers(1, 7)) if generation == "A" else None,
        pad=draw(st.integers(1, 128)),
        tokens=draw(st.none() | st.lists(st.integers(0, S), min_size=R, max_size=R).map(tuple)),
        routing=routing,
        fill=Spec(draw(st.sampled_from(["ints", "real"]))),
        scenario=Spec(draw(st.sampled_from(["base", "two_poisons"]))),
        seed=draw(st.integers(0, 2**40)),
        witnesses=tuple(draw(st.lists(st.sampled_from(["padding", "slot_used", "triple"]), max_size=4))),
    )


@given(cases())
def test_printing_and_reading_are_inverse(case: Case) -> None:
    text = str(case)
    assert Case.parse(text) == case
    assert str(Case.parse(text)) == text
    assert not set(text) & set(" []/\\'\"")


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (f"{SMALL}+H128+I128+pad16+uniform+fill:ints+bf16+moe+base+seed0", SMALL),
        (f"{SMALL}+zipf:2", f"{SMALL}+zipf:2.0"),
        (f"{SMALL}+tokens:9,9,9,9", SMALL),
        (f"{SMALL}+@slot_used+@duplicate+@slot_used", f"{SMALL}+@duplicate+@slot_used"),
        ("genA+R4+E8+K2+S9+slots2", "genA+R4+E8+K2+S9"),
        ("hot:05+S9+K2+E8+R4+genB", f"{SMALL}+hot:5"),
    ],
)
def test_one_spelling(text: str, printed: str) -> None:
    assert str(Case.parse(text)) == printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{SMALL}+unifrom", "unknown part 'unifrom' of a case; did you mean 'uniform'?"),
        (f"{SMALL}+zpif:2", "did you mean 'zipf:EXPONENT'?"),
        (f"{SMALL}+r4", "did you mean 'RNUMBER'?"),
        (f"{SMALL}+fill:reel", "unknown fill 'reel'; did you mean 'real'?"),
        (f"{SMALL}+@slots_used", "unknown witness 'slots_used'; did you mean 'slot_used'?"),
        (f"{SMALL}+qqq", "known: uniform, hot:EXPERT"),
        (f"{SMALL}+R2", "'R2' sets R a second time"),
        ("genB+R4+E8", "lacks K, S; a case starts like 'genB+R4+E8+K2+S9'"),
        ("", "unknown part ''"),
        ("genC+R4+E8+K2+S9", "generation 'C' is not A or B"),
        ("genB+R4+E9+K2+S9", "E=9 is not divisible by R=4: each rank owns E/R experts; the next larger E is 12"),
        ("genB+R4+E8+K33+S9", "K=33 experts per token: must be 1 to 32"),
        ("genB+R129+E129+K2+S9", "R=129 ranks: must be 1 to 128"),
        ("genB+R0+E8+K2+S9", "R=0 ranks: must be 1 to 128"),
        ("genB+R4+E8+K2+S0", "S=0 tokens per rank: must be at least 1"),
        ("genB+R1000000000+E8+K2+S9+tokens:9", "R=1000000000 ranks: must be 1 to 128"),
        ("genB+R4+E4000000000+K2+S9", "E=4000000000 experts: must be 1 to 65536"),
        ("genB+R4+E8+K2+S9+H8000000000", "H=8000000000: must be at most 1048576"),
        ("genB+R4+E8+K2+S9+I2000000", "I=2000000: must be at most 1048576"),
        ("genB+R4+E8+K2+S9+H1048576+I1048576", "the weights of all experts would have 52776558133248 bytes"),
        ("genB+R128+E128+K8+S131072+H1048576", "the rows of all ranks would have"),
        ("genB+R128+E128+K32+S500000", "R*S*K is 2048000000 routes, limit 134217728"),
        ("genA+R4+E8+K2+S9+slots1000000000", "slots=1000000000: must be at most 65536"),
        ("genB+R4+E8+K2+S" + "9" * 5000, "S has a number of 5000 digits"),
        ("genB+R4+E8+K2+S9+hot:" + "1" * 5000, "has an argument that is not a number; usage: hot:EXPERT"),
        ("genB+R2+E4+K2+S9+tokens:" + "1" * 5000 + ",2", "is not tokens:COUNT"),
        ("x" * 2**21, "a case of 2097152 characters: the limit is 1048576"),
        ("genB+R4+E8+K32+S600000", "NvS is 19200064 rows a rank, limit 16777215: lower S, K or pad"),
        ("genB+R2+E2+K1+S16777210+pad6", "NvS is 16777224 rows a rank, limit 16777215"),
        (f"{SMALL}+pad0", "pad=0 (token padding): must be at least 1"),
        (f"{SMALL}+slots1", "only generation A takes a slot count"),
        ("genA+R4+E8+K2+S9+slots0", "slots=0: must be at least 1"),
        (f"{SMALL}+H12", "H=12: must be a multiple of 8"),
        (f"{SMALL}+I0", "I=0: must be at least 1"),
        (f"{SMALL}+tokens:1,2", "tokens has 2 values for R=4 ranks"),
        (f"{SMALL}+tokens:1,2,3,10", "rank 3 has 10, a rank dispatches 0 to S=9"),
        (f"{SMALL}+tokens:1,x,3,4", "'tokens:1,x,3,4' is not tokens:COUNT"),
        (f"{SMALL}+hot:8", "hot: expert id 8 at position 0 is outside 0..7"),
        (f"{SMALL}+hot:-1", "hot: expert id -1 at position 0 is outside 0..7"),
        (f"{SMALL}+hot", "'hot' has 0 arguments; usage: hot:EXPERT"),
        (f"{SMALL}+hot:", "'hot:' is not a name or name:arg,arg"),
        (f"{SMALL}+hot:x", "'hot:x' has an argument that is not a number"),
        (f"{SMALL}+zipf:nan", "zipf exponent nan: must be 0 to 100"),
        ("genB+R1+E8+K2+S9+all_remote", "all_remote needs R >= 2"),
        ("genB+R2+E2+K1+S1+table:0", "table has 1 ids, R*S*K = 2*1*1 = 2 are needed"),
        ("genB+R2+E2+K1+S1+table:0,2", "table: expert id 2 at position 1 is outside 0..1"),
    ],
)
def test_bad_cases_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(CaseError) as error:
        Case.parse(text)
    assert message in str(error.value)


def rule_is_missed(case: Case) -> bool:
    """The rule of docs/contract.md, Limits, in other words: stored rows and columns, and bytes of scales."""
    halved, scales = {"bf16": (1, None), "mxfp4": (2, 1 / 32), "fp8": (1, 4 / 128**2)}[case.format.name]
    widths = [case.H, case.I]
    stored = [size for width in widths for size in (width, width // halved)]
    nbytes = [] if scales is None else [int(case.H * case.I * scales)]
    planned = case.R % 2 == 0 or case.E // case.R % 4 == 0
    return not planned or any(size % 128 for size in stored) or any(size % 16384 for size in nbytes)


@pytest.mark.parametrize("form", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("sizes", ["R2+E4", "R3+E9", "R3+E12"])
@pytest.mark.parametrize("widths", ["", "+H384", "+I384", "+H256+I512", "+H512+I1024", "+H4096+I8192"])
def test_a_reason_names_the_limit_that_is_missed(form: str, sizes: str, widths: str) -> None:
    """The numbers in it are those of the case, they miss the limit, and once they keep it the reason is gone."""
    case = Case.parse(f"genB+{sizes}+K2+S3{widths}" + f"+{form}" * (form != "bf16"))
    reason = case.unportable
    assert (reason is not None) == rule_is_missed(case)
    if reason is None:
        return
    assert f"R={case.R} is odd, and E/R={case.experts_per_rank}" in reason or reason.startswith(
        f"H={case.H}, I={case.I}: {form} "
    )
    numbers = [int(one) for one in re.findall(r"\d+", reason.partition(": ")[2] or reason)]
    limit = numbers[
        -1
    ]  # "... and 64 is no multiple of 128", "... has 512 bytes of scales for gate, no multiple of ..."
    missing = [number for number in numbers[:-1] if number % limit]
    assert missing, reason


def test_portable_means_real_hardware_accepts_it() -> None:
    assert Case.parse("genB+R3+E12+K2+S9").portable
    assert not Case.parse("genB+R3+E9+K2+S9").portable
    assert not Case.parse(f"{SMALL}+H64").portable
    assert not Case.parse(f"{SMALL}+I64").portable


def test_vocabulary_has_exactly_what_is_implemented() -> None:
    from moonep_validate.data.problem import _HIDDEN
    from moonep_validate.data.routing import _GENERATORS
    from moonep_validate.judge.witnesses import WITNESSES
    from moonep_validate.scenarios import SCENARIOS

    implemented: dict[str, Iterable[str]] = {
        "routing": _GENERATORS,
        "fill": _HIDDEN,
        "scenario": SCENARIOS,
        "witness": WITNESSES,
    }
    for field, names in implemented.items():
        assert {name for name, word in VOCABULARY.items() if word.field == field} == set(names)


@pytest.mark.parametrize(("old", "new"), [("nemesis:3", "in_flight:3"), ("answers", "configurations")])
def test_an_old_word_is_understood_and_said_once(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    grammar._note.cache_clear()
    assert [str(Case.parse(f"{SMALL}+hot:5+{old}")) for _ in range(2)] == [f"{SMALL}+hot:5+{new}"] * 2
    word, said = old.split(":")[0], capsys.readouterr().err
    assert said == (
        f"moonep-validate: the case word {word!r} is now {new.split(':')[0]!r}; the old one goes with version 0.2.0\n"
    )
    assert grammar.renewed(f"*+{old}*") == f"*+{new}*"
    assert Case.parse(f"{SMALL}+hot:5+{new}") == Case.parse(f"{SMALL}+hot:5+{old}")
    with pytest.raises(CaseError, match=f"unknown part '{word}s'"):
        Case.parse(f"{SMALL}+{word}s")


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("slot", ["sign-lost", "slot-not-filled", "one-slot-lost"], "slot-not-filled"),
        ("slot-lost", ["sign-lost", "slot-not-filled"], "slot-not-filled"),
        ("Slot", ["sign-lost", "slot_used"], "slot_used"),
        ("lost", ["last", "sign-lost"], "sign-lost"),
        ("slots_used", ["slots_everywhere", "slot_used"], "slot_used"),
        ("slto", ["sign-lost", "slot"], "slot"),
        ("unifrom", ["zipf", "uniform"], "uniform"),
        ("qqq", ["zipf", "uniform"], None),
        ("", ["zipf"], None),
    ],
)
def test_near_words_start_alike_then_contain_it_then_are_spelled_alike(
    name: str, known: list[str], meant: str | None
) -> None:
    assert near(name, known) == ([meant] if meant else [])


def test_near_words_of_faults_start_with_the_same_word() -> None:
    with pytest.raises(CaseError, match="did you mean 'slot-"):
        parse_fault("slot")
