"""Which of a row's logits are the best, and where a share of their weight ends, without sorting them.

A row of V logits is a list of chunks of 256. What ordering needs is a threshold: the highest logit at or
above which there are so many logits, or so much weight. It is found by bisection, each step of which passes
over the chunks that may hold it, the row's *live* chunks. With 50 of 128256 tokens wanted that is one chunk
in ten at most: at or above the 50th highest of the chunks' maxima lie 50 logits at least.

Logits are compared as keys: integers in the order of the numbers. A weight is a probability over the best
one's, as a multiple of 2^-40 in an int64. Sums of integers do not depend on their order, so that whatever a
row is divided into, its sums are the same to the last bit; what is lost, less than 2^-40 a token, is less
than float32 sums lose.
"""

import triton
import triton.language as tl

CHUNK = 256  # of a row: 512 bytes of bfloat16, a load of 16 bytes for each thread of a warp
GROUP = 16  # chunks handled at once
MOST_LOGITS = 2**22  # of a row, for the sums of weights

LEAST_KEY = tl.constexpr(-2139095041)  # of minus infinity
NO_KEY = tl.constexpr(-2147483648)  # below all
_NAN_KEY = tl.constexpr(2147483647)
_UNIT = tl.constexpr(float(2**40))
_WEIGHTLESS = tl.constexpr(28.0)  # e to the minus 28 is below 2^-40
# Two groups, 8 KiB each of 16-bit logits, are on the way from the level-2 cache while one is summed. More
# take registers that there are not.
_STAGES = tl.constexpr(3)
# Steps that halve the difference of two logits; then the number of keys between them is halved, of which
# there are more the closer to zero, but never more than 2^32.
_STEPS_BY_VALUE = tl.constexpr(20)


@triton.jit
def key_of(x):
    """Of float32 numbers: the two zeros are equals, and NaN is above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN_KEY)


@triton.jit
def number_of(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, largest, temperature, min_p):
    """0 for whatever is not a number. The difference is taken before the quotient, which could overflow."""
    share = tl.exp((x - largest) / temperature)
    return (tl.where(share >= min_p, share, 0.0) * _UNIT).to(tl.int64)


@triton.jit
def lowest_weighty(largest, temperature):
    """A key below which nothing weighs anything."""
    return key_of(largest - _WEIGHTLESS * temperature)


@triton.jit
def middle_of(low, high, step):
    """A key above `low`, below `high`, both int64 and more than one apart."""
    by_value = key_of(0.5 * number_of(low) + 0.5 * number_of(high - 1)).to(tl.int64)
    middle = tl.where(step < _STEPS_BY_VALUE, by_value, low + (high - low) // 2)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def load_group(p_row, p_live, first, num_live, size, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Live chunks from `first` on: ids, logits and keys [GROUP, CHUNK]; the key below all where there is
    none."""
    i_live = first + tl.arange(0, GROUP)[:, None]
    chunk = tl.load(p_live + i_live, mask=i_live < num_live, other=0)
    i_token = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_token = (i_live < num_live) & (i_token < size)
    x = tl.load(p_row + i_token, mask=is_token, other=0.0).to(tl.float32)
    return i_token, x, tl.where(is_token, key_of(x), NO_KEY)


@triton.jit
def _above(
    p_row,
    p_live,
    num_live,
    size,
    threshold,
    largest,
    temperature,
    min_p,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """Of the live chunks' logits at or above a key: how many, their weight, the lowest of their keys; and the
    highest key of the others. All int64."""
    count = tl.zeros([GROUP, CHUNK], tl.int32)
    weight = tl.zeros([GROUP, CHUNK], tl.int64)
    lowest = tl.full([GROUP, CHUNK], _NAN_KEY, tl.int32)
    highest = tl.full([GROUP, CHUNK], NO_KEY, tl.int32)
    for first in tl.range(0, num_live, GROUP, num_stages=_STAGES):
        _, x, key = load_group(p_row, p_live, first, num_live, size, CHUNK, GROUP)
        is_above = key >= threshold
        count += is_above.to(tl.int32)
        if WEIGHED:
            weight += tl.where(is_above, weight_of(x, largest, temperature, min_p), 0)
        lowest = tl.minimum(lowest, tl.where(is_above, key, _NAN_KEY))
        highest = tl.maximum(highest, tl.where(is_above, NO_KEY, key))
    return (
        tl.sum(tl.sum(count, 1), 0).to(tl.int64),
        tl.sum(tl.sum(weight, 1), 0),
        tl.min(tl.min(lowest, 1), 0).to(tl.int64),
        tl.max(tl.max(highest, 1), 0).to(tl.int64),
    )


@triton.jit
def select(
    p_row,
    p_live,
    num_live,
    size,
    target,
    by_count,
    low,
    largest_key,
    temperature,
    min_p,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """The highest key at or above which the live chunks' logits amount to `target`, by number or by weight,
    which they do at `low`; and the count and weight of those above it. All int64.

    After its first steps both ends are keys of logits: a bracket ends as soon as it holds one, and no step is
    spent on a gap.
    """
    largest = number_of(largest_key)
    low = low.to(tl.int64)
    high = largest_key.to(tl.int64) + 1
    count_above = tl.zeros([], tl.int64)
    weight_above = tl.zeros([], tl.int64)
    step = 0
    while high - low > 1:
        middle = middle_of(low, high, step)
        count, weight, lowest, highest = _above(
            p_row, p_live, num_live, size, middle.to(tl.int32), largest, temperature, min_p,
            CHUNK, GROUP, WEIGHED,
        )  # fmt: skip
        enough = tl.where(by_count, count, weight) >= target
        low = tl.where(enough, tl.maximum(lowest, middle), low)
        count_above = tl.where(enough, count_above, count)
        weight_above = tl.where(enough, weight_above, weight)
        high = tl.where(enough, high, tl.minimum(highest + 1, middle))
        step += 1
    return low, count_above, weight_above


@triton.jit
def nth_of_key(p_row, p_live, num_live, size, key, nth, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The id of the live chunks' logit of a key before which there are `nth` of it; `size` if there is
    none."""
    found = size
    nth = nth.to(tl.int32)
    for first in range(0, num_live, GROUP):
        i_token, _, keys = load_group(p_row, p_live, first, num_live, size, CHUNK, GROUP)
        is_equal = tl.reshape((keys == key).to(tl.int32), [GROUP * CHUNK])
        is_it = (is_equal > 0) & (tl.cumsum(is_equal, 0) == nth + 1)
        ids = tl.reshape(i_token, [GROUP * CHUNK])
        found = tl.minimum(found, tl.min(tl.where(is_it, ids, size), 0))
        nth -= tl.sum(is_equal, 0)
    return found


@triton.jit
def bound_of(keys, amounts, target, low, largest_key):
    """A key at or above which the chunks' maxima `keys` amount to `target`, the highest or little less, so
    that the logits do; `low` if they do not amount to it even there. Coarse is good enough."""
    enough_at_low = tl.sum(tl.where(keys >= low, amounts, 0), 0) >= target
    found = low.to(tl.int64)
    high = tl.where(enough_at_low, largest_key.to(tl.int64) + 1, found + 1)
    for step in range(12):
        if high - found > 1:
            middle = middle_of(found, high, step)
            enough = tl.sum(tl.where(keys >= middle.to(tl.int32), amounts, 0), 0) >= target
            found = tl.where(enough, middle, found)
            high = tl.where(enough, high, middle)
    return found.to(tl.int32)
