"""Which weights and tokens show every scale and every code, while what is computed with them stays in range?

A weight is a code of E2M1 times a power of two. The powers are sums, whose terms cancel from stage to stage:

========= ==================== ==============================================================================
gate      ``2**(a[i] + c[k])`` a rises over the rows i, c over the blocks k of 32 columns
up        ``2**(t[i] + c[k])`` ``t[i] = -a[i] - b[j]``, j the block of 32 columns in which down meets row i
down      ``2**(d[r] + b[j])`` d rises over the rows r, b falls over the blocks j
token     ``2**(-c[k])``       so g is near ``2**a``, u near ``2**t``, g * u near ``2**-b``, y near ``2**d``
========= ==================== ==============================================================================

Exponents are -125 to 125, scale bytes 2 to 252: with codes of 1/2 to 6, from BF16's smallest normal number almost
to its largest (below are those that kernels may flush). At H = I = 128 gate or up has each of these bytes in one
block of 128 x 128, and all terms of a sum are of one size: a scale that is clamped, rounded to a common one
or read elsewhere changes it. Each block of 32 holds every code in the low and in the high nibbles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonep_validate.formats import mxfp4
from moonep_validate.hashing import below, hashed

#: Largest magnitudes of the two terms of an exponent; with a code of 6 their sum stays below 2**128.
_ALONG, _ACROSS = 62, 63
_CODES = len(mxfp4.VALUES)
#: Power of the tokens: a product with codes of up to 6, summed over H, stays near 1.
_TOKEN = -4


def weights(expert: Tensor, seed: int, layer: int, H: int, I: int) -> dict[str, Tensor]:
    """Weights of some experts, bf16: gate and up ``[n, I, H]``, down ``[n, H, I]``.

    Args:
        expert: global ids, int64 ``[n, 1]``.
        seed, layer: vary the codes.
        H, I: multiples of 32.
    """
    row = torch.arange(I)
    block = row // mxfp4.BLOCK
    turned = block * mxfp4.BLOCK + (5 * row + 3 * expert) % mxfp4.BLOCK  # another order of rows in each expert
    a = _rising(I, _ACROSS)[turned]  # [n, I]
    along_i = -_rising(I // mxfp4.BLOCK, _ALONG)[block]
    t = -a - along_i
    odd = expert % 2 == 1  # up has the wide range of exponents in every other expert
    a, t = torch.where(odd, t, a), torch.where(odd, a, t)
    d, c = _rising(H, _ACROSS), _columns(H)
    exponents = {
        "gate": a[..., None] + c,
        "up": t[..., None] + c,
        "down": (d[:, None] + along_i).expand(len(expert), H, I),
    }
    return {name: _times_codes(name, seed, layer, expert, exponent) for name, exponent in exponents.items()}


def hidden(noise: Tensor) -> Tensor:
    """Tokens ``[n, H]`` float32 of normal-like noise, of the powers that cancel those of the columns."""
    return torch.ldexp(noise, _TOKEN - _columns(noise.shape[-1]))


def _columns(H: int) -> Tensor:
    return _rising(H // mxfp4.BLOCK, _ALONG)[torch.arange(H) // mxfp4.BLOCK]


def _rising(count: int, largest: int) -> Tensor:
    """``count`` whole numbers from ``-largest`` to ``largest``, int64; 0 if it is only one."""
    return 2 * largest * torch.arange(count) // max(count - 1, 1) - largest * (count > 1)


def _times_codes(name: str, seed: int, layer: int, expert: Tensor, exponent: Tensor) -> Tensor:
    """Codes times ``2**exponent``: the low nibbles of a block run through all codes, as do the high ones."""
    rows, columns = exponent.shape[1:]
    column = torch.arange(columns)
    place, nibble = column % mxfp4.BLOCK // 2, column % 2
    index = (expert[..., None], torch.arange(rows)[:, None], column // mxfp4.BLOCK, nibble)
    noise = hashed(f"scales {name}", seed, layer, *index)
    code = (
        (2 * below(noise, _CODES // 2) + 1) * place + below(noise >> 16, _CODES)
    ) % _CODES  # an odd step: all 16
    return torch.ldexp(torch.tensor(mxfp4.VALUES)[code], exponent).to(torch.bfloat16)
