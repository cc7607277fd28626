"""Flight: how many micro-batches a pipeline stage holds between their forward and backward at the worst moment.

The orders are those of `lumos.schedules.schedules`; counting is closed form, because a search asks thousands of times.
"""

from __future__ import annotations

from lumos.setup.setup import Setup


def held(setup: Setup, stage: int) -> tuple[int, ...]:
    """Micro-batches held of every virtual stage of `stage`, in the order of the model."""
    parallel, microbatches = setup.parallel, setup.train.microbatches
    pp, vpp = parallel.pp, parallel.vpp
    if vpp > 1 and parallel.schedule == "interleaved":
        return _interleaved(stage, pp, vpp, microbatches)
    if pp == 1 and vpp == 1:
        return (1,)
    if vpp > 1 or parallel.schedule == "gpipe":
        return (microbatches,) * vpp
    if parallel.schedule == "zero-bubble":  # what waits for its weight gradients counts as held: 1F1B's worst stage
        return (min(pp, microbatches),)
    return (min(pp - stage, microbatches),)


def _interleaved(stage: int, pp: int, vpp: int, microbatches: int) -> tuple[int, ...]:
    """The forwards before the first backward, dealt to the chunks pp at a time (Narayanan et al. 2021)."""
    total = microbatches * vpp
    ahead = total if microbatches == pp else min((pp - stage - 1) * 2 + (vpp - 1) * pp, total)
    rounds, rest = divmod(min(ahead + 1, total), pp * vpp)
    return tuple(min(rounds * pp + min(max(rest - chunk * pp, 0), pp), microbatches) for chunk in range(vpp))
