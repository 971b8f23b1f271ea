"""The glossary of metrics: what each one means, its unit and its healthy range. docs/metrics.md shows the same table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

TABLE = """
## Rewards and success
reward/mean | Mean combined reward. | reward | rising
reward/std | Population standard deviation of the combined reward. | reward | above 0
reward/kl | Mean KL penalty that `kl_in=reward` subtracts. | reward |
reward/NAME/CRITERION | Mean score of one criterion of the rubric NAME. | share |
reward/NAME | Mean of the reward NAME; mean_ and std_ for rewards named mean and std. | reward |
accuracy | Share of trajectories whose first reward with a `success_at` reached it. | share | rising
groups/count | Groups with more than one trajectory. | groups |
groups/zero_spread | Share of zero-variance groups. | share of groups | below 1
groups/refills | Resampling rounds of dynamic sampling. | rounds |
groups/dropped | Groups that dynamic sampling dropped. | groups |
replay/groups | Groups of earlier steps that trained once more. | groups |
replay/age | Mean age of the oldest tokens of the groups that trained once more. | versions | up to rollout.replay
curriculum/skipped | Share of the prompts that the curriculum of prompts passed over in the last batch. | share | below 1
model_faults/REWARD/KIND | Answers that got 0 for more than being wrong, such as math/timeout. | answers |
  near 0

## Episodes
trajectories | Finished trajectories. | trajectories |
turns | Mean assistant turns per trajectory. | turns |
completion_length/mean | Mean tokens of the policy per trajectory. | tokens |
completion_length/p90 | 90th percentile of the policy's tokens per trajectory. | tokens |
completion_length/max | Largest number of the policy's tokens in a trajectory. | tokens |
prompt_length/mean | Mean tokens per prompt. | tokens |
truncated | Share of trajectories that reached a token limit or the end of the context. | share | below 0.95, where an
  alert begins
stop/REASON | Share of trajectories that stopped for REASON: done, max_steps, length or context. | share |
failures | Attempts that failed through no fault of the policy. | attempts | 0; above
  rollout.max_failed_share the run stops
failures/CLASS | Failed attempts of a class, such as env/timeout or math/unavailable. | attempts | 0
played_again/CLASS | Attempts that succeeded at the retry, by class of the failure. | attempts | 0
env/privileged | Share of trajectories that a teacher with more in its prompt reads (sdft, sdpo). | share | above 0
env/tool_calls | Mean tool calls per trajectory with a finished turn. | calls | above 0
env/tool_errors | Mean tool calls that got an error as answer. | calls | below env/tool_calls
env/runs | Mean programs per trajectory, in the environment `code`. | programs |
env/first_try | Share of trajectories whose first program passed the known tests. | share |
env/repaired | Share of trajectories whose later program passed the known tests. | share |
env/commands | Mean commands per trajectory, in the environment `shell`. | commands | above 0
env/exit_errors | Mean commands that ended with another exit code than 0. | commands |
env/timeouts | Mean commands that were stopped after `env.command_s`. | commands | 0
env/tests_timed_out | Share of trajectories whose hidden tests were stopped after their time. | share | 0
env/requests | Mean requests of an agent per trajectory. | requests |
env/refused | Mean requests of an agent that were refused, per trajectory. | requests | 0 beside limits
env/ignored_fields | Mean fields of an agent's requests that were ignored, per trajectory. | fields |
env/forks | Mean token records of an agent per trajectory, besides the first. | forks |
env/compactions | Mean compactions of the history, over the trajectories with any. | compactions |
env/generated_tokens | Mean tokens sampled for an agent per trajectory. | tokens |
env/trained_tokens | Mean tokens of an agent that train, per trajectory. | tokens |
env/return | Mean sum of step rewards, in Gymnasium and OpenEnv. | reward |
env/invalid_actions | Mean invalid actions per trajectory. | replies |
env/judge_tokens | Mean tokens per trajectory that the judge of a rubric read and wrote. | tokens |
env/judge_reused | Share of a rubric's verdicts that were known, from the cache or an equal answer. | share |
env/special_tokens | Mean special tokens encoded as ordinary text, over the trajectories with any. | tokens |
env/kept_thoughts | Mean tokens that the chat template would drop from the last prompt, over the trajectories with
  any. | tokens | 0 with `env.thoughts=drop`
env/NAME | Mean of what an environment measured as NAME. | as the environment defines |
tool/NAME/calls | Calls of the tool NAME, failed attempts included. | calls |
tool/NAME/raised/ERROR | Calls of the tool NAME that raised ERROR at a line of your code. | calls | 0
share | Share of the trajectories that belong to a part of an environment mixture, or to a pool. | share |
weight | Share of the next prompts that a part or pool gets. | share |
success | Success rate of a part or pool, as an exponential mean. | share |

## Policy updates
loss | Sum of the weighted token losses of an optimizer step. | loss | finite
policy_loss | Mean policy-gradient loss over the policy's tokens. | loss | finite
grad_norm | Norm of the gradient before clipping. | norm | above 0 and stable
update_ratio | Norm of an optimizer step's change of a few weights of each matrix, relative to their norm. | ratio | above
  3e-8, where float32 rounds it away
lr | Learning rate of the optimizer step. | learning rate |
ratio/mean | Mean ratio of new to old probabilities of the sampled tokens. | ratio | near 1
ratio/max | Largest ratio of new to old probability of a sampled token. | ratio |
clip_fraction | Share of the policy's tokens whose ratio was clipped. | share of tokens | 0 with one update per
  rollout
clip_fraction/first | The same in the first update of each step, where ratios should be 1. | share of tokens | 0; an
  alert begins above 0.05
entropy | Mean entropy of the policy's next-token distribution; entropy_coef enables it. | nats | above 5 % of its
  first values
surprise | Mean negative log-prob of sampled tokens; at temperature 1 it estimates the entropy. | nats per token |
  above 5 % of its first values
kl | Mean estimated KL divergence from the reference model. | nats per token |
reference/unscored | Share of the policy's tokens that a teacher's server did not score; they do not train. | share of
  tokens | 0
teacher_divergence | Mean divergence between teacher and policy, see `algorithm.divergence`. | nats per token | falling
teacher_kl | Mean log-prob of the policy minus that of the teacher. | nats per token | falling
teacher_mass | Mean probability that the teacher gives to its `algorithm.top_k` tokens. | share 0 to 1 | high
positive_nll | Mean negative log-likelihood of the tokens of successful trajectories (VAPO). | nats per token |
update/tokens | Policy tokens that the step trained on. | tokens | above 0
update/empty | 1 if no trajectory was left to train on. | 0 or 1 | absent
skipped | 1 if the optimizer step was skipped, because the loss or gradient was not finite. | 0 or 1 | absent

## Critic
value_loss | Mean loss of the critic's values. | loss | falling
value/mean | Mean of the critic's values. | reward | near return/mean
return/mean | Mean of the returns that the critic learns. | reward |
value/squared_error | Mean squared difference between values and returns. | reward squared | falling
critic/tokens | Policy tokens that the critic trained on. | tokens | above 0
critic/empty | 1 if no trajectory was left to train the critic on. | 0 or 1 | absent

## Datasets
nll | Mean negative log-likelihood of the tokens that SFT trains on. | nats per token | falling
dpo/accuracy | Share of pairs whose chosen answer gained more than the rejected one. | share | above 0.5
dpo/margin | Mean implicit reward of chosen answers minus that of rejected ones. | reward | above 0
dpo/chosen | Mean implicit reward of the chosen answers. | reward |
kto/accuracy | Share of answers whose implicit reward has the sign of their label. | share | above 0.5
kto/margin | Mean implicit reward, with the sign of the label. | reward | above 0
kto/kl | Estimate of the KL divergence from the reference, on mismatched answers. | nats |
rm/accuracy | Share of pairs whose chosen answer has the higher score. | share | above 0.5
rm/margin | Mean score of the chosen answer minus that of the rejected one. | score | above 0

## Engines
mismatch/mean | Mean absolute difference between the log-probs of engine and trainer. | nats | about 1e-5 or less in
  float32; an alert begins above 0.1
mismatch/max | Largest absolute difference between the log-probs of engine and trainer. | nats | not growing
mismatch/k3 | Estimate of the KL divergence between engine and trainer with k3. | nats | near 0
mismatch/newest | Share of tokens from the newest weights, which alone are measured. | share | above 0
mismatch/canary | Mean difference of their log-probs of the canary's tokens, after each publish. | nats | not growing
mismatch/ess | Effective sample size of the importance weights between engine and trainer. | share | near 1
staleness | Mean age of the tokens that train. | versions | up to the bound
staleness/max | Age of the oldest token that trains. | versions | up to the bound
fleet/idle | Share of the time since the last step in which a server had no request. | share | near 0
fleet/servers | Inference servers in the pool. | servers | all servers
fleet/attempts | Requests to servers since the start. | requests |
fleet/retries | Retries of requests since the start. | requests | 0
fleet/failures | Failed requests since the start. | requests | 0
fleet/doubles | Requests that were answered twice since the start. | requests | 0
fleet/left | Departures of servers from the pool since the start. | times | 0
fleet/came_back | Returns of servers to the pool since the start. | times |
fleet/moved | Episodes that continued on another server since the start. | episodes |

## Speed and memory
tokens/s | Tokens of a step, divided by its duration. | tokens per second |
time/PHASE | Duration of a phase; `step` is everything before the checkpoint. | seconds |
memory/PHASE | Peak memory of the first process in a phase: on its GPU, or resident without one. | GB |
resources/cpu_percent | Processor time of the first process since the last step. | percent of one core |
resources/rss_gb | Resident memory of the first process. | GB |
resources/peak_rss_gb | Peak resident memory of the first process. | GB |
resources/gpu_gb | Allocated memory on the GPU of the first process. | GB |
resources/peak_gpu_gb | Peak allocated memory on the GPU of the first process. | GB |
resources/gpu_reserved_gb | Memory that PyTorch reserved on the GPU of the first process. | GB |
"""
"""Sections of rows "name | meaning | unit | healthy range"; an indented line continues the row above.

A word in capitals in a name, such as NAME, stands for any text.
"""

PREFIXES = {
    "eval/METRIC": "The metric on the held-out set; `eval.jsonl` has it without the prefix.",
    "part/NAME/METRIC": "The metric for one part of an environment mixture, or one pool of a dataset.",
    "role/NAME/METRIC": "The metric for the trajectories of one role.",
    "critic/METRIC": "The metric for the optimizer steps of the critic.",
}
"""Prefixes of names, and the part of the run that the metric then describes."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric or a family of metrics, as the table describes it."""

    name: str
    meaning: str
    unit: str
    healthy: str

    def __str__(self) -> str:
        return f"{self.meaning} Unit: {self.unit}." + (f" Healthy: {self.healthy}." if self.healthy else "")

    def sentence(self) -> str:
        """Return the name, the meaning and the healthy range in one line."""
        return f"{self.name}: {self.meaning}" + (f" Healthy: {self.healthy}." if self.healthy else "")


@cache
def sections() -> dict[str, list[Metric]]:
    """Return the metrics of the table by the title of their section."""
    by_title: dict[str, list[Metric]] = {}
    for line in re.sub(r"\n +", " ", TABLE).strip().splitlines():
        if line.startswith("## "):
            metrics = by_title.setdefault(line.removeprefix("## "), [])
        elif line:
            metrics.append(Metric(*(cell.strip() for cell in line.split("|"))))
    return by_title


@cache
def find(name: str) -> Metric | None:
    """Return the entry of a logged metric, which may have prefixes; None if the table has none.

    >>> find("eval/part/sums/reward/math").name
    'reward/NAME'
    """
    metrics = [metric for section in sections().values() for metric in section]
    for metric in sorted(metrics, key=lambda metric: metric.name != name):  # a plain name before a family
        if re.fullmatch(_pattern(metric.name), name):
            return metric
    rests = (match["METRIC"] for prefix in PREFIXES if (match := re.fullmatch(_pattern(prefix), name)))
    return next(filter(None, map(find, rests)), None)


@cache
def _pattern(name: str) -> str:
    """Return the regular expression of a family of names."""
    words = re.split(r"\b([A-Z]{2,})\b", name)
    return "".join(f"(?P<{word}>.+?)" if at % 2 else re.escape(word) for at, word in enumerate(words))
