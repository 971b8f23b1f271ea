"""Parts of a setup that are broken on purpose."""

from rl4llm.algorithms.grpo import GRPO
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, RewardExample

REWRITES_HISTORY = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'user' and not loop.last %}{{- 'earlier: ' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


class Lies(BaseRewardFunction):
    """Promises 1 and gives 0."""

    def __init__(self, name="lies"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **columns):
        return 0.0

    def examples(self):
        return [RewardExample([ChatMessage("assistant", "yes")], "yes", 1.0)]


class Talks(BaseMDPEnv):
    """Answers every turn."""

    def respond(self, sample):
        return [ChatMessage("user", "And then?")]


def misspelled(text: str) -> str:
    """A tool.

    Args:
        text: Anything.
    """
    return txet  # noqa: F821


class Unmoved(GRPO):
    """Has a gradient, which is zero."""

    def surrogate(self, batch, logprobs_BT):
        return batch.advantages_BT * (logprobs_BT - logprobs_BT), {}


class MeanOfMicroBatch(GRPO):
    """Divides by the tokens of the batch that it happens to be given."""

    def token_losses(self, batch, logprobs_BT, entropy_BT):
        losses_BT, metrics = super().token_losses(batch, logprobs_BT, entropy_BT)
        return losses_BT / batch.mask_BT.sum(), metrics
