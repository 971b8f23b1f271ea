"""One recipe per registered method: how it learns the task in seconds, and which options its invariance is tested with.

A method without a recipe fails the tests, so that a new one comes with its proof.
"""

from __future__ import annotations

from learning import Recipe, ranked, read, teacher, told

EVERYTHING = {
    "scale_rewards": "batch",
    "whiten": True,
    "mask_truncated": True,
    "kl_coef": 0.1,
    "kl_in": "loss",
    "kl_weighted": True,
    "entropy_coef": 0.01,
    "old_logprobs": "recomputed",
    "correction": "sequence_icepop",
    "correction_low": 0.2,
    "correction_high": 5.0,
}
IN_REWARD = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
TURNS = {"turn_discount": 0.9}
AGGREGATIONS = tuple({"aggregation": name} for name in ("token", "sequence", "prompt", "constant"))
SHARED = (EVERYTHING, IN_REWARD, *AGGREGATIONS)
"""Options of every policy-gradient method."""
WITHOUT_CORRECTION = (
    {
        name: value
        for name, value in EVERYTHING.items()
        if not name.startswith("correction") and name != "old_logprobs"
    },
    *SHARED[1:],
)
"""Those of methods whose ratio is to the sampler."""
CRITIC = {"critic_lr": 4e-3, "critic_passes": 2, "critic_warmup_steps": 2}
LONGER = {"max_steps": 20}

RECIPES: dict[str, Recipe] = {
    **{
        name: Recipe(invariance=(*SHARED, TURNS))
        for name in ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "gmpo", "gspo", "gspo_token", "rloo", "sapo")
    },
    **{name: Recipe(invariance=(*WITHOUT_CORRECTION, TURNS)) for name in ("dppo", "dppo_kl")},
    "distill": Recipe(
        options={"teacher_path": teacher},
        invariance=(
            {"teacher_path": "t", "reward_coef": 0.5},
            {"teacher_path": "t", "old_logprobs": "recomputed"},
        ),
    ),
    "explore_grpo": Recipe(invariance=SHARED),
    "gdpo": Recipe(
        options={"reward_weights": {"vowels": 1.0}},
        invariance=tuple(
            {"reward_weights": {"right": 1.0, "short": 0.3}, **options}
            for options in (
                {},
                {"whiten": True, "mask_truncated": True},
                {"filter_groups": True},
                *AGGREGATIONS,
            )
        ),
    ),
    "gigpo": Recipe(invariance=SHARED),
    "maxrl": Recipe(
        invariance=({"whiten": True, "mask_truncated": True}, TURNS, *AGGREGATIONS), nonnegative=True
    ),
    "pkpo": Recipe(invariance=({"k": 3}, *SHARED, TURNS)),
    "ppo": Recipe(options=CRITIC, overrides=LONGER, invariance=SHARED),
    "rae": Recipe(invariance=SHARED),
    "reinforce_pp": Recipe(invariance=(*SHARED, {"gamma": 0.9})),
    "reinforce_pp_baseline": Recipe(invariance=(*SHARED, TURNS)),
    "remax": Recipe(overrides=LONGER, invariance=SHARED),
    # Answers of 12 tokens are so short that the paper's alpha of 0.05 would give a lambda of 0.
    "sdft": Recipe(
        learn=told, invariance=({"old_logprobs": "recomputed", "correction": "tis", "ratio_max": 1.1},)
    ),
    "sdpo": Recipe(
        learn=told,
        options={"solved_at": 2.0},  # feedback alone
        invariance=({"distill_coef": 0.4, "scale_rewards": "batch", "mask_truncated": True}, *AGGREGATIONS),
    ),
    "vapo": Recipe(options={**CRITIC, "alpha": 0.5}, overrides=LONGER, invariance=({"alpha": 0.5}, *SHARED)),
    "sft": Recipe(learn=read, invariance=({"aggregation": "sequence"},)),
    "dpo": Recipe(
        learn=read,
        options={"nll_coef": 0.2},
        invariance=({"loss": "ipo", "length_normalized": True}, {"label_smoothing": 0.1}, {"nll_coef": 0.5}),
    ),
    "online_dpo": Recipe(options={"beta": 0.5}, invariance=({"nll_coef": 0.5},)),
    "kto": Recipe(learn=read, options={"beta": 0.5}, invariance=({"desirable_weight": 1.3},)),
    "reward_model": Recipe(learn=ranked),
}
