"""Who goes first: `scheduling_policy`, as one number that a request gets when it arrives. Torch-free.

A `Sequence.rank` begins with it. The order of ranks is that of the waiting line, of who gets a step's tokens,
and, from its end, of who is preempted. It never changes, so a policy costs nothing once a request is here.
"""

from octavo.config import SchedulingPolicy
from octavo.errors import InvalidArgument

# How many tokens of later requests are let past a request, for each of its own: the more, the less short ones
# wait for long ones, and the longer these. Times to the first token as parts of what they are without any, in
# a queue loaded to 0.95, log-normal prompts: the mean 0.90, 0.69, 0.32 and 0.24 for 1, 4, 16 and 64, and the
# longest 1.1, 1.5, 3.1 and 5.9 (`tests/engine/test_policy.py` has that queue).
PASSED_PER_TOKEN = 16


def check_priority(policy: SchedulingPolicy, priority: int) -> None:
    """Raises `InvalidArgument` for a priority that nothing would come of. 0 is what a request has anyway."""
    if priority != 0 and policy != "priority":
        raise InvalidArgument(
            f"the request's priority is {priority}, but scheduling_policy is '{policy}', which knows none; "
            "leave octavo_priority out, or set scheduling_policy to 'priority' in model.json"
        )


def precedence(policy: SchedulingPolicy, priority: int, num_uncomputed_tokens: int, clock_tokens: int) -> int:
    """The lower, the earlier; equal ones are served in order of arrival.

    `clock_tokens` counts the tokens that the engine has computed by now. Under `sjf` a prompt goes the
    earlier the fewer tokens it has to compute, and ages as the engine computes: what comes once
    `PASSED_PER_TOKEN` tokens were computed for each of a request's own goes behind it. So nobody starves, and
    nothing has to be known of the output.
    """
    if policy == "priority":
        return priority
    if policy == "sjf":
        return clock_tokens + PASSED_PER_TOKEN * num_uncomputed_tokens
    return 0
