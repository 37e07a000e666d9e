"""Values of an fp8 cache (e4m3), two at a time.

On their way to the tensor cores tiles are turned over, for which there are instructions for 16-bit
elements only; values of 8 bits would be gathered one by one, which takes longer than to read them
from memory. So a tile is loaded as words of two neighbours, turned over as such, and falls apart in
registers into a tile of the even and one of the odd columns. fp16 has every value of fp8.
"""

from __future__ import annotations

from nanovllm.kernels._triton import INTERPRETED, jit, tl

if INTERPRETED:

    @jit
    def unpack_pairs(words):
        """fp16 tiles of the low and of the high bytes of int16 words."""
        return _from_byte(words), _from_byte(words >> 8)

    @jit
    def _from_byte(byte):
        # The bits of e4m3 have their places in fp16, but for a bias of the exponent that is 8 less.
        scaled = (((byte & 0x7F) << 7) | ((byte & 0x80) << 8)).to(tl.float16, bitcast=True)
        return tl.where(byte & 0x7F == 0x7F, float("nan"), scaled * 256.0).to(tl.float16)

else:

    @jit
    def unpack_pairs(words):
        """fp16 tiles of the low and of the high bytes of int16 words."""
        # Two words at once: converting gives the two values of a word, and the tiles take turns.
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            .reg .b32 of_first, of_second;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 of_first, first;
            cvt.rn.f16x2.e4m3x2 of_second, second;
            prmt.b32 $0, of_first, of_second, 0x5410;
            prmt.b32 $1, of_first, of_second, 0x7632;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@jit
def split_columns(x):
    """The even and the odd columns of x [M, N]."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@jit
def join_columns(even, odd):
    """What `split_columns` has split."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])
