"""The lines that scripts/mutate.py breaks, and the tests that must notice.

Each fragment occurs exactly once in its file; `tests/test_mutants.py` checks that, and that the tests exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from os.path import normpath


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line that is broken: `code` in `file` becomes `broken`, and one of `tests` must fail."""

    name: str
    file: str
    code: str
    broken: str
    tests: tuple[str, ...]


def _of(package: str, directory: str, *rows: tuple[str, str, str, str, str]) -> list[Mutant]:
    """Mutants of one package: name, file, code, what it becomes, and tests as `file::test`, separated by spaces."""
    found = []
    for name, file, code, broken, tests in rows:
        nodes = tuple(normpath(f"{directory}/{test}") for test in tests.split())
        found.append(Mutant(name, normpath(f"rl4llm/{package}/{file}"), code, broken, nodes))
    return found


GOLDEN = "test_golden.py::test_methods_give_the_stored_numbers_in_any_arrangement"
ORACLES = "test_oracles.py::test_the_library_says_what_the_paper_says"
ARRANGED = "test_invariance.py::test_arrangement_changes_neither_loss_nor_gradient"
EVERYTHING = (
    "scale_rewards+whiten+mask_truncated+kl_coef+kl_in+kl_weighted+entropy_coef+old_logprobs"
    "+correction+correction_low+correction_high"
)
OFF_POLICY = "test_off_policy.py::test"
NO_PASS = "test_invariance.py::test_old_log_probs_of_a_first_update_need_no_pass"
TRIE = "test_pack.py::test_records_of_a_trie_stay_what_they_are_under_the_budget"
ANCESTORS = "test_attention.py::test_attention_sees_its_ancestors_and_its_own_past_only"
SHARING = "test_torch_backend.py::test_sharing_any_prefix_keeps_the_plain_models_gradient"
TEMPERATURE = "test_training.py::test_log_probs_use_the_temperature_of_the_samples"
SERVED = "test_server.py::test_"
POOL = "test_verifier_pool.py::test"
STALE = "test_staleness.py::test_publishing_does_not_wait_for_episodes"
REPEATABLE = "test_staleness.py::test_a_repeatable_run_plays_nothing_across_a_checkpoint"

ALGORITHMS = _of(
    "algorithms",
    "tests/algorithms",
    ("surrogate_pessimism", "functional.py", "-unclipped_BT.minimum(clipped_BT)", "-clipped_BT", GOLDEN),
    ("mean_of_bnpo", "bnpo.py", 'aggregation: str = "token"', 'aggregation: str = "sequence"', GOLDEN),
    ("clip_bounds", "functional.py", "ratio_BT.clamp(1 - low, 1 + high)", "ratio_BT.clamp(1 - high, 1 + low)", GOLDEN),
    ("group_deviation", "functional.py", "std(correction=1)", "std(correction=0)", GOLDEN),
    ("leave_one_out", "functional.py", "(size / max(size - 1, 1))", "1.0", GOLDEN),
    ("value_clip_pessimism", "functional.py", "error_BT.maximum((held", "error_BT.minimum((held", GOLDEN),
    ("kl_k3_direction", "functional.py", "(-difference_BT).exp() - 1 + diff", "difference_BT.exp() - 1 - diff", GOLDEN),
    ("entropy_sign", "policy_gradient.py", "loss_BT - self.entropy_coef", "loss_BT + self.entropy_coef", GOLDEN),
    ("batch_deviation_over_ranks", "functional.py", "return (total((flat_N", "return (((flat_N",
     f"{ARRANGED}[grpo-{EVERYTHING}]"),
    ("weight_of_a_penalty", "policy_gradient.py", "(logprobs_BT - batch.sampled_logprobs_BT).exp()",
     "(logprobs_BT - batch.old_logprobs_BT).exp()", f"{OFF_POLICY}_a_weighted_penalty_is_unbiased"),
    ("gradient_of_a_weighted_penalty", "policy_gradient.py", "penalty_BT = kl(logprobs", "penalty_BT = kl_loss(logprobs",
     f"{OFF_POLICY}_a_weighted_penalty_is_unbiased"),
    ("trust_region_side", "dppo.py", "(drift_BT < -self.clip_low)", "(drift_BT > self.clip_low)", ORACLES),
    ("divergence_of_the_rest", "dppo.py", "- sampled_BT.exp() * log_BT", "+ sampled_BT.exp() * log_BT", ORACLES),
    ("masked_log_ratio", "dppo.py", "self.log_ratio_coef * log_BT.square()",
     "self.log_ratio_coef * log_BT.masked_fill(masked_BT, 0.0).square()", ORACLES),
    ("ratio_to_the_sampler", "dppo.py", "return {}", 'return {"old_logprobs": "recomputed"}',
     "test_off_policy.py::test_old_samples_move_the_right_answer_up"),
    ("rewards_one_by_one", "gdpo.py", "self.compare(rewards_G)", "rewards_G", ORACLES),
    ("scale_of_the_step", "gdpo.py", "scale = deviation(credits, total)", "scale = deviation(credits, lambda x: x)",
     f"{ARRANGED}[gdpo-reward_weights]"),
    ("scale_of_pass_at_k", "pkpo.py", "(size * self.k / (size - self.k))", "(size * self.k / size)", ORACLES),
    ("sets_with_a_better_reward", "pkpo.py", "math.comb(place - 1, k - 2)", "math.comb(place, k - 2)", ORACLES),
    ("mean_of_maxrl", "maxrl.py", "(rewards_G - mean) / mean if", "(rewards_G - mean) / mean.sqrt() if", ORACLES),
    ("negative_rewards_of_maxrl", "maxrl.py", "if (rewards_G < 0).any():", "if False:",
     "test_algorithms.py::test_maxrl_has_no_credit_without_a_success"),
    ("decay_of_a_role", "rae.py", "self.decay**count", "self.decay", ORACLES),
    ("role_of_a_mean", "rae.py", '{trajectory.part}/{trajectory.role}"', '{trajectory.part}"', ORACLES),
    ("means_of_all_ranks", "rae.py", "for part in everyone(members)", "for part in [members]",
     "test_rae.py::test_ranks_agree_on_the_mean_of_a_role"),
    ("means_resumed", "rae.py", 'dict(state.get("means", {}))', "{}",
     "test_rae.py::test_a_resumed_run_compares_with_the_same_mean"),
    ("student_of_an_update", "distill.py", "logprobs_BT.detach() - batch.ref", "batch.old_logprobs_BT - batch.ref",
     f"{OFF_POLICY}_distillation_follows_the_divergence_from_the_teacher"),
    ("options_for_old_samples", "policy_gradient.py", 'return {"old_logprobs": "re', 'return {} and {"old_logprobs": "re',
     f"{OFF_POLICY}_old_samples_move_the_right_answer_up"),
    ("constant_old_log_probs", "policy_gradient.py", "= logprobs_BT.detach()", "= logprobs_BT", NO_PASS),
    ("correction_direction", "correction.py", "(batch.old_logprobs_BT - batch.sampled_logprobs_BT)",
     "(batch.sampled_logprobs_BT - batch.old_logprobs_BT)", GOLDEN),
    ("correction_bound", "correction.py", "(judged_BT >= low) & (judged_BT <= high)", "judged_BT <= high", GOLDEN),
    ("whitening_mean_over_ranks", "returns.py", "mean = summed / count.clamp(min=1)", "mean = flat_N.mean()",
     f"{ARRANGED}[ppo-]"),
    ("gae_discount", "returns.py", "gamma * next_SL", "next_SL", GOLDEN),
    ("turn_of_two_versions", "../core/types.py", "for author, _ in groupby(span.author for span in spans)",
     "for author in [span.author for span in spans]",
     "test_returns.py::test_a_turn_that_two_versions_wrote_counts_once"),
    ("reward_at_the_end_of_turn", "returns.py", "batch.credits_BT * turn_ends(batch)", "batch.credits_BT * 1", ORACLES),
    ("pair_sign", "sequences.py", "side(1) - side(-1)", "side(-1) - side(1)", GOLDEN),
)  # fmt: skip

DATA = _of(
    "data",
    "tests/data",
    ("image_path_outside", "images.py", "file.is_relative_to(directory.resolve())", "True",
     "test_images.py::test_what_is_no_image_within_the_limits_is_refused"),
    ("mean_over_trajectories", "pack.py", "policy_tokens.clip(1) * totals.sequences",
     "policy_tokens.clip(1) * len(prompts)",
     "test_pack.py::test_totals_of_ranks_add_up_so_that_their_weights_do"),
    ("mean_over_tokens", "pack.py", "1 / max(totals.tokens, 1)", "1 / max(policy_tokens.sum(), 1)",
     "test_pack.py::test_totals_of_ranks_add_up_so_that_their_weights_do"),
    ("weight_of_context", "pack.py", "weights=(weights[owner] * mask)", "weights=(weights[owner])",
     "test_pack.py::test_weights_of_a_trajectory_sum_to_its_share"),
    ("tree_records_of_a_place", "layouts.py", "(np.minimum(shared, flat.openings[flat.order]) - 1)", "(shared - 1)",
     TRIE),
    ("tree_budget", "layouts.py", "shared[place] == 0 or computed > budget", "shared[place] == 0", TRIE),
    ("tree_columns", "pack.py", "np.concatenate([record[:shared], own])", "np.concatenate([record[:shared] * 0, own])",
     "test_pack.py::test_a_token_is_computed_in_the_place_of_the_same_history"),
    ("tree_groups", "layouts.py", "if groups[one] == groups[other]:", "if True:",
     "test_pack.py::test_groups_share_nothing_with_each_other"),
    ("tree_short_runs", "layouts.py", "depth - depths[-1] >= SHORTEST", "True",
     "test_layouts.py::test_few_tokens_beyond_what_others_share_are_repeated"),
    ("tree_images", "pack.py", "np.where(image_ids >= 0, -1 - image_ids, token_ids)", "token_ids",
     "../backends/test_tower.py::test_samples_with_another_image_share_what_is_before_it"),
    ("segment_ids", "layouts.py", "np.arange(len(order)) - starts[group] + 1", "1",
     "test_pack.py::test_every_trajectory_is_in_exactly_one_batch_as_recorded"),
    ("mask_of_context", "pack.py", 'np.array([span.author == "policy" for span in spans])',
     "np.array([span.logprobs is not None or len(span.token_ids) > 0 for span in spans])",
     "test_pack.py::test_every_trajectory_is_in_exactly_one_batch_as_recorded"),
    ("credit_of_a_turn", "pack.py", 'turn += span.author == "policy" != before', 'turn += span.author == "policy"',
     "test_pack.py::test_credits_per_turn_ignore_changes_of_weights_in_a_turn"),
    ("append_only_end", "render.py", "token_ids[cut:]", "token_ids",
     "test_render.py::test_a_turn_is_closed_exactly_once_even_if_truncated"),
    ("tools_of_a_prompt", "render.py", "self._template.text(messages)", "self._template.without_tools().text(messages)",
     "test_render.py::test_a_whole_prompt_equals_apply_chat_template"),
    ("text_is_never_control", "special.py", "names[found.group()], text)", "found.group(), text)",
     "test_special.py::test_follow_up_with_special_tokens_adds_no_turn"),
    ("share_of_a_prompt", "curriculum.py", "4 * rate * (1 - rate)", "rate",
     "test_prompt_curriculum.py::test_a_prompt_is_drawn_in_its_share_of_the_epochs"),
    ("epoch_of_a_prompt", "curriculum.py", '"curriculum", epoch, row)', '"curriculum", row)',
     "test_prompt_curriculum.py::test_a_prompt_is_drawn_in_its_share_of_the_epochs"),
    ("success_resumed", "curriculum.py", 'dict(state.get("success", {}))', "{}",
     "test_prompt_curriculum.py::test_a_resumed_curriculum_of_prompts_continues_exactly"),
    ("cursor_advance", "prompts.py", "self._consumed += total", "self._consumed += self.batch_size",
     "test_prompts.py::test_an_epoch_has_every_row_once_in_disjoint_shards"),
    ("cursor_restore", "prompts.py", '        self._consumed = state["consumed"]', "        self._consumed = 0",
     "test_prompts.py::test_a_resumed_stream_continues_exactly"),
)  # fmt: skip

TRAINERS = _of(
    "trainers",
    "tests/trainers",
    ("temperature_of_the_update", "rl.py", '{"temperature": self.preparation.temperature}', "{}",
     TEMPERATURE),
    ("temperature_of_old_log_probs", "prepare.py", "self._numbers(self.policy, batch) if needs",
     "self.policy.forward(batch) if needs", TEMPERATURE),
    ("old_log_probs_before_all_updates", "prepare.py", "len(packed[0].batches) if later", "len(batches) if later",
     f"../algorithms/{NO_PASS}"),
    ("old_log_probs_before_all_passes", "prepare.py", "and self.batching.passes_per_rollout == 1", "",
     f"../algorithms/{NO_PASS}"),
    ("success_of_a_prompt", "rl.py", "succeeded + success, episodes + 1", "succeeded, episodes + 1",
     "test_mixture.py::test_prompts_are_drawn_by_the_success_of_their_latest_group"),
    ("draws_are_groups", "prepare.py", "replace(trajectory, draw=draw)", "replace(trajectory, draw=0)",
     "test_prepare.py::test_two_draws_of_a_prompt_are_two_groups"),
    ("zero_credits_under_kl", "prepare.py", "every_token or any(", "any(",
     "test_training.py::test_a_kl_penalty_in_the_loss_trains_groups_of_equal_rewards"),
    ("totals_over_ranks", "prepare.py", "self.ranks.total(counts).tolist()", "counts.tolist()",
     f"../algorithms/{ARRANGED}[grpo-]"),
    ("micro_batches_on_all_ranks", "prepare.py", "self.ranks.largest(len(batches)) - len(batches)", "0",
     f"../algorithms/{ARRANGED}[grpo-]"),
    ("critic_warm_up", "prepare.py", "step >= critic.warmup_steps", "step >= 0",
     "test_needs.py::test_in_the_warm_up_only_the_critic_learns"),
    ("credits_not_finite", "../runtime/returned.py", "if not all(map(math.isfinite,", "if not all(map(float,",
     "../test_mistakes.py::test_a_wrong_key_is_answered_with_the_next_step"),
    ("losses_without_a_gradient", "../runtime/returned.py", "if numbers_BT.requires_grad and not", "if False and not",
     "../test_mistakes.py::test_a_wrong_key_is_answered_with_the_next_step"),
    ("zero_gradient_in_check", "../extensions/inspect/check/laws.py", "if norms == 0 and any(", "if norms < 0 and any(",
     "../extensions/inspect/check/test_check.py::test_a_loss_without_an_effect_fails"),
    ("pictures_by_value", "../data/columns.py", "if _is_picture(value, directory)]", "if False]",
     "../data/test_rows.py::test_a_bad_row_stops_the_run_or_is_skipped_and_counted"),
    ("rows_that_a_template_refuses", "../data/lengths.py", "(DataError, TemplateError) as", "DataError as",
     "../data/test_lengths.py::test_dropped_rows_leave_the_others_as_they_were"),
    ("truth_that_no_reply_gives", "../rewards/math.py", "if all(self._settle_one(answer, golds)[0] == 0.0 for",
     "if all(False for", "../rewards/test_math_reward.py::test_an_answer_that_no_reply_can_give_is_a_fault"),
    ("numbers_as_text", "../rewards/callables.py", "truths if self.by_name else list(map(number_text, truths))", "truths",
     "../rewards/test_callables.py::test_a_plain_function_gets_numbers_as_a_csv_file_has_them"),
    ("equal_keys", "../core/message.py", "if key in row:", "if key is row:",
     "../core/test_message.py::test_what_cannot_be_read_is_refused"),
    ("margin_of_a_row", "../data/demonstrations.py", 'row.get("margin", 0.0)', "0.0",
     "test_preferences.py::test_a_reward_model_learns_the_margin_of_a_row"),
    ("steps_of_epochs", "../compose/supervised.py", "math.ceil(round(epochs * rows / batch, 6))", "math.ceil(epochs)",
     "test_preferences.py::test_epochs_are_passes_over_the_rows_and_resume"),
    ("refills_until_full", "rl.py", "(missing := target - self._count(step)[0]) > 0",
     "(missing := target - self._count(step)[0]) > 1",
     "test_dynamic_sampling.py::test_dropped_groups_are_replaced_until_the_step_is_full"),
    ("stale_tokens", "rl.py", "if not versions.issubset(range(oldest, self.step + 1)):", "if not versions:",
     "test_training.py::test_tokens_of_weights_that_were_not_published_stop_the_run"),
    ("one_version_too_old", "rl.py", "max(0, self.step - self.staleness.limit)", "self.step - self.staleness.limit - 1",
     "test_staleness.py::test_a_token_beyond_the_bound_stops_the_run"),
    ("clip_of_a_first_update", "rl.py", 'if not step.moved and "clip', 'if "clip',
     "test_training.py::test_an_episodes_record_has_the_trainers_numbers"),
    ("bound_of_staleness", "rl.py", "self.staleness.limit + 1,", "self.staleness.limit + 2,",
     "test_staleness.py::test_every_prompt_trains_once_and_within_the_bound"),
    ("publish_waits_for_nothing", "rl.py", "if self.staleness.repeatable:", "if self.staleness.limit:", STALE),
)  # fmt: skip

ENVS = _of(
    "envs",
    "tests/envs",
    ("fork_where_thoughts_drop", "policy.py", "if fork is not None:", "if fork is not None and False:",
     "test_thoughts.py::test_each_prompt_is_what_a_server_would_render"),
    ("compact_in_time", "compaction.py", ">= self._at", "> self._at",
     "test_compaction.py::test_history_of_exactly_that_many_tokens_is_compacted"),
    ("compact_begins_with_the_summary", "compaction.py", "record.start = len(sample.messages)", "pass",
     "test_compaction.py::test_next_record_begins_with_the_prompt_and_the_summary"),
    ("compact_cut_summary", "compaction.py", '"length" and not self._may_cut', '"never"',
     "test_compaction.py::test_cut_summary_ends_the_episode_as_a_cut_answer"),
    ("compact_keeps_records", "../core/sample.py", "(*special.forks, self.spans[:])", "(self.spans[:],)",
     "test_compaction.py::test_every_sampled_token_trains_once_with_its_credit"),
    ("compact_origin_turn", "../core/sample.py", "Origin(relation, len(special.forks), turns)",
     "Origin(relation, 0, turns)", "test_compaction.py::test_next_record_begins_with_the_prompt_and_the_summary"),
    ("compact_stored_origins", "stored.py", 'for origin in row["origins"]]', "for origin in ()]",
     "test_compaction.py::test_played_episode_comes_back_with_its_records"),
    ("compact_refuses_other_loops", "compaction.py", "if not append:", "if False:",
     "test_compaction.py::test_loop_that_ignores_the_key_is_refused"),
    ("compact_remote_records", "../extensions/remote/wire.py", "chain(*seat.special.forks, seat.spans)",
     "chain(seat.spans)",
     "../extensions/remote/test_remote.py::test_hosted_episodes_are_compacted_as_local_ones"),
    ("unfinished_thought", "../core/message.py", 'return text[start:], ""', "return text[start:], text[start:]",
     "../rewards/test_extract.py::test_thoughts_of_every_model_hold_no_answer"),
    ("thought_of_special_tokens", "../data/render.py", "if answer == after_thinking(without(text)):", "if text:",
     "test_thoughts.py::test_thought_between_special_tokens_is_no_content"),
    ("arguments_under_an_unknown_key", "tools/formats/calls.py", "if under is None and (unread", "if False and (unread",
     "tools/test_formats.py::test_call_without_arguments_has_no_other_keys"),
    ("argument_without_its_end", "tools/formats/tagged.py", 'place, close = following.start(), ""', "pass",
     "tools/test_formats.py::test_calls_are_found_as_each_format_writes_them_in_order"),
    ("call_of_another_model", "tool.py", " or stray_calls(turn, self.tools, self.format)", "",
     "test_tool_env.py::test_call_in_the_form_of_another_model_is_an_error"),
    ("further_arguments", "tools/arguments.py", "if closed and name not in properties", "if name not in properties",
     "tools/test_toolsets.py::test_schema_tells_whether_further_arguments_are_allowed"),
    ("seeds_of_a_row_on_ranks", "stream.py", "earlier=prompts.earlier,", "earlier=None,",
     "test_stream.py::test_any_number_of_ranks_plays_the_same_draws"),
    ("oldest_draws_first", "stream.py", "oldest = self.rounds[0]", "oldest = self.rounds[-1]",
     "test_stream.py::test_no_token_is_older_than_the_bound"),
    ("draws_of_a_checkpoint", "stream.py", '"rounds": rounds}', '"rounds": []}',
     "test_stream.py::test_a_resumed_run_trains_what_the_other_would"),
    ("rows_that_others_played", "rollout.py", "(earlier or {}).items()", "{}.items()",
     "test_rollout.py::test_a_row_on_two_ranks_is_sampled_as_twice_on_one"),
    ("stop_reason", "../core/sample.py", 'stop_reason=sample.stop_reason or "done"', 'stop_reason="done"',
     "test_rollout.py::test_an_episode_that_never_ends_is_cut_at_its_turn_limit"),
    ("failed_samples_left_out", "rollout.py", "            if sample.failure is None\n        }",
     "            if sample.policy_spans\n        }",
     "test_rollout.py::test_a_failed_sample_is_left_out_and_never_scored"),
    ("share_of_failures", "rollout.py", "if causes.total() > max_failed_share * len(episodes):",
     "if causes.total() > len(episodes):", "test_rollout.py::test_too_many_failures_stop_the_run"),
    ("authorship", "policy.py", "if content.strip() in (text.strip() for text in texts):", "if content.strip():",
     "test_rollout.py::test_loop_that_edits_sampled_text_fails_with_advice"),
    ("seed_of_a_sample", "policy.py", "*whose, sample.index, *draw)", "*whose, *draw)",
     "test_rollout.py::test_a_group_shares_its_prompt_and_nothing_else"),
    ("full_context", "policy.py", 'sample.finish("context")', 'sample.finish("length")',
     "test_rollout.py::test_an_episode_that_fills_the_context_ends_there"),
)  # fmt: skip

BACKENDS = _of(
    "backends", "tests/backends",
    ("tree_ancestors", "attention.py", "for number, length in path]", "for number, length in path[-1:]]", ANCESTORS),
    ("tree_ancestors_of_one_call", "varlen.py", "np.concatenate([keys[parent], own]) if parent >= 0", "own if parent >= 0",
     ANCESTORS),
    ("tree_cut", "attention.py", "    opens[behind] |= is_own[behind] & ~begins[behind]\n", "", ANCESTORS),
    ("tree_whole_ancestors", "attention.py", "            lengths[parents[child]] = whole[parents[child]]\n",
     "            pass\n", f"{SHARING}[qwen3-1]"),
    ("tree_states", "recurrent.py", "after[block.path[-1][0]]", "after[block.path[0][0]]", f"{SHARING}[qwen3_5-1]"),
    ("tree_one_log_prob", "heads.py", "columns + computed_BT.flatten()[asked_N]", "columns + asked_N % columns",
     "test_heads.py::test_a_token_of_several_trajectories_is_predicted_once"),
    ("names_in_memory", "model_backend.py", "return self._names.converted(self.own_weights())", "return self.own_weights()",
     "test_checkpoint_names.py::test_what_is_published_is_what_save_pretrained_writes"),
    ("layers_left_out", "lora.py", "excluded.add(name)", "pass",
     "test_lora.py::test_layers_that_peft_cannot_adapt_are_left_out"),
    ("masters_not_rounded", "optimizer.py", "            self._round()\n", "",
     "test_torch_backend.py::test_bf16_publishes_and_exports_rounded_masters"),
    ("masters_not_loaded", "torch_backend.py", "if name in self._optimizer.masters:", "if False:",
     "test_torch_backend.py::test_two_steps_resume_and_two_more_equal_four_bit_for_bit"),
)  # fmt: skip

INFERENCE = _of(
    "inference",
    "tests/inference",
    ("dense_model_of_a_hybrid", "embedded/model_decode.py", '"_is_stateful", False) and not declared)',
     '"_is_stateful", False) and not self.recurrent)', "test_families.py::test_a_family_samples_what_its_own_forward_says"),
    ("scales_by_position", "../backends/positions.py", "(position_ids.float() + 1.0)", "(0.0 * position_ids.float() + 1.0)",
     "test_families.py::test_a_loaded_model_computes_what_transformers_does"),
    ("windows_hide", "embedded/model_decode.py", "if size is None or window.last <= size:", "if True:",
     "test_families.py::test_a_window_hides_tokens_but_does_not_shorten_the_context"),
    ("states_begin_at_zero", "embedded/model_decode.py", "        states[cache.window.opening] = 0\n", "",
     "test_families.py::test_recurrent_rows_of_unequal_length_do_not_mix"),
)  # fmt: skip

SYNC = _of(
    "sync",
    "tests/sync",
    ("canary_not_a_number", "verify.py", "if not difference <= tolerance:", "if difference > tolerance:",
     "test_verify.py::test_scores_that_are_not_numbers_exceed_every_tolerance"),
    ("canary_bound", "verify.py", "tolerance or BOUNDS[dtype]", "tolerance or BOUNDS['bfloat16']",
     "test_verify.py::test_the_bound_is_that_of_the_dtype_unless_it_is_given"),
    ("canary_calibrated_once", "verify.py", "self._calibrated = self._calibrated or {", "self._calibrated |= {",
     "test_verify.py::test_an_engine_that_joins_later_is_not_calibrated"),
    ("canary_version", "verify.py", "if version != weight_ref.version:", "if version > weight_ref.version:",
     "test_verify.py::test_right_weights_under_another_version_are_refused"),
    ("canary_kept_weights", "verify.py", "        self._check_moved(engine, scored_BT, expected_BT, version)\n", "",
     "test_verify.py::test_small_steps_add_up_until_kept_weights_are_noticed"),
    ("canary_every_engine", "verify.py", "engines = client.engines()\n", "engines = client.engines()[:1]\n",
     "test_verify.py::test_every_engine_is_asked_and_one_that_is_stale_is_enough"),
    ("mismatch_not_a_number", "verify.py", "not mean <= stop_above", "mean > 2 * stop_above",
     "test_mismatch.py::test_a_mismatch_beyond_the_limit_stops_training"),
)  # fmt: skip

TEAM = "test_threads.py::test_a_thread_that_waits_keeps_no_openmp_team"
RUNTIME = _of(
    "runtime",
    "tests/extensions",
    ("host_of_a_website", "rebinding.py", "        raise web.HTTPForbidden(", "        web.HTTPForbidden(",
     "servers/test_embedded.py::test_websites_cannot_send_requests"),
    ("team_of_a_waiting_thread", "runner.py", "                end_openmp_threads()\n", "", f"../runtime/{TEAM}"),
    ("sharding_of_accelerate", "ranks.py", "if (sharded or environ", "if (sharded and environ",
     "../test_launchers.py::test_what_accelerate_asks_for_in_vain_is_logged"),
    ("last_commit", "../extensions/launch/modal_app.py", "        _tried(step, reason)\n", "        pass\n",
     "launch/test_modal.py::test_modal_trainer_saves_before_the_last_commit"),
    ("directories_in_a_card", "../extensions/export/card.py", 'DIRECTORY.sub("", yaml', 'str(yaml',
     "../test_cli.py::test_a_model_card_has_neither_secrets_nor_local_paths"),
    ("team_of_finished_work", "threads.py", "    finally:\n        end_openmp_threads()\n", "", f"../runtime/{TEAM}"),
)  # fmt: skip
SERVERS = _of(
    "extensions/servers",
    "tests/extensions/servers",
    ("version_read_back", "sync/filesystem.py", "        self._store.verify(weight_ref)\n", "",
     "test_filesystem.py::test_a_version_that_does_not_read_back_reaches_no_server"),
    ("finite_weights", "sync/store.py", "torch.isfinite(low) and torch.isfinite(high)", "torch.isfinite(low)",
     "test_store.py::test_weights_that_are_not_finite_are_not_published"),
    ("finite_weights_of_a_broadcast", "sync/distributed.py",
     "        deque(checked(*narrowed(specs, backend.weights(), self._dtype)), maxlen=0)\n", "",
     "test_distributed.py::test_damaged_weights_reach_no_engine_and_take_no_fallback"),
    ("leased_version", "sync/store.py", "v, n in self._leases.items() if n > 0", "v, n in () if n > 0",
     "test_store.py::test_the_newest_and_leased_versions_are_kept"),
    ("chat_beside_the_loop", "embedded/openai.py", "await self._in_thread(self._rendered, request)",
     "self._rendered(request)", "test_embedded.py::test_a_server_continues_while_a_chat_is_rendered"),
    ("chat_of_any_length", "embedded/openai.py", "self.check_size(request.characters //", "self.check_size(0 //",
     "test_embedded.py::test_a_chat_is_bounded_before_it_is_rendered"),
    ("numerics_of_the_trainer", "fleet/build.py", "= vision, autocast_of(config)", '= vision, ""',
     "test_embedded.py::test_training_equals_that_of_the_engine_in_process"),
    ("generation_without_weights", "fleet/cohosted.py", 'self._demand("answer", DeviceState.READY)',
     'self._demand("answer", DeviceState.READY, DeviceState.EMPTY)',
     "test_cohost.py::test_nothing_is_generated_between_waking_and_loading"),
    ("claim_before_the_first_version", "sync/wrappers.py",
     "        self._claims.take()\n        return await", "        return await",
     "test_claim.py::test_a_second_trainer_is_refused_before_it_publishes"),
    ("restart_that_is_never_ready", "launch.py", "began = math.inf", "began = time.monotonic()",
     "test_launch.py::test_a_restart_that_is_never_ready_counts_however_long"),
)  # fmt: skip

REMOTE = _of(
    "extensions/remote",
    "tests/extensions/remote",
    ("message_that_grew", "wire.py", "        del seat.messages[len(seat.messages) - new.replaced :]\n", "",
     "test_remote.py::test_episodes_on_a_host_equal_the_local_ones"),
    ("lost_host", "hosts.py", "                    self._hosts.lost(self._link, error)\n", "                    pass\n",
     "test_remote.py::test_a_host_that_hangs_is_lost_when_its_time_is_over"),
)  # fmt: skip

AGENTS = _of(
    "",
    "tests/extensions/agents",
    ("compact_by_an_agent", "extensions/agents/origins.py", "if begin < len(entry.messages) and _repeats", "if _repeats",
     "test_origins.py::test_other_history_that_begins_alike_is_rewritten"),
    ("compact_tool_text", "extensions/agents/origins.py", 'if message.role != "tool")', ")",
     "test_origins.py::test_other_history_that_begins_alike_is_rewritten"),
    ("compact_or_sub_agent", "extensions/agents/origins.py", "if entry.waits and not _same_task",
     "if entry.waits and _same_task", "test_origins.py::test_conversation_during_a_call_was_called_by_it"),
    ("refused_request", "extensions/agents/env.py", "elif session.refusals:", "elif False:",
     "test_wires.py::test_an_episode_with_a_refused_request_fails_unless_repeated"),
    ("repeated_request", "extensions/agents/session.py", "return bool(same) or", "return bool(same) and",
     "test_wires.py::test_an_episode_with_a_refused_request_fails_unless_repeated"),
    ("unknown_content", "envs/wire.py", "elif name in REFUSED or not is_metadata(self[name]):", "elif name in REFUSED:",
     "test_wires.py::test_unknown_metadata_is_ignored_and_unknown_content_refused"),
    ("one_call", "envs/dialects.py", "[: 1 if asked.one_call else None]", "",
     "test_wires.py::test_one_call_at_a_time_ends_the_answer_after_the_first"),
)  # fmt: skip

ADAPTERS = _of(
    "extensions/adapters",
    "tests/extensions/adapters",
    ("code_in_an_answer", "_reasoning_gym.py", "if harmful or (names", "if (names",
     "test_reasoning_gym.py::test_a_reply_runs_no_code_and_forges_no_reward"),
    ("evaluation_in_a_worker", "_reasoning_gym.py", "not _watch.sandboxed)", "False)",
     "test_reasoning_gym.py::test_tasks_that_evaluate_need_a_sandbox"),
    ("blind_verifier", "_reasoning_gym.py", "return paid > 2", "return False",
     "test_reasoning_gym.py::test_unknown_tasks_and_blind_verifiers_are_refused"),
    ("reason_as_reward", "textarena.py", "sorted(arguments, key=lambda one: not isinstance(one, str))", "arguments",
     "test_textarena.py::test_an_invalid_move_is_rewarded_with_a_number"),
)  # fmt: skip

SANDBOX = _of(
    "extensions/sandbox",
    "tests/extensions/sandbox",
    ("outputs_with_a_checker", "layouts.py", "if value and _JUDGED.search(name)", "if False and _JUDGED.search(name)",
     "test_units.py::test_outputs_that_a_row_does_not_compare_are_refused"),
    ("patches_of_another_process", "layouts.py", "if used := _SHARED.search(", "if used := _JUDGED.search(",
     "test_units.py::test_tests_that_need_one_process_are_refused_before"),
    ("captured_output", "judge.py", '"printed": candidate.printed()', '"printed": ()',
     "test_units.py::test_what_tests_share_with_a_program_reaches_it"),
    ("names_of_the_tests", "code_tests.py", "if lacked == names or entry_point in lacked:", "if names:",
     "test_units.py::test_faults_of_tests_are_not_those_of_programs"),
    ("class_named_like_a_literal", "_inside_objects.py", "return named and kind not in LITERALS and", "return named and",
     "test_published.py::test_objects_of_a_program_cannot_pass_its_tests"),
    ("margin_of_a_fence", "code_tests.py", "0 if behind else len(lead)", "0",
     "test_code_reward.py::test_the_last_block_of_python_is_the_code"),
)  # fmt: skip

REWARDS = _of(
    "rewards",
    "tests/rewards",
    ("failures_are_not_scored", "scoring.py", "values.masked_fill(~scored, math.nan)", "values.masked_fill(~scored, 0.0)",
     "test_score.py::test_a_sample_that_one_reward_failed_counts_for_no_reward"),
    ("equal_items_of_a_list", "compare.py", "unmatched.pop(verdicts.index(True))", "verdicts.index(True)",
     "test_compare.py::test_different_numbers_and_words_are_different"),
    ("worker_killed_from_outside", "pool.py", '{"died": 1,', '{"died": 0,',
     f"{POOL}_a_process_killed_from_outside_costs_no_result"),
    ("time_without_a_processor", "pool.py", "(time.monotonic() - _queued_s() - start)", "(time.monotonic() - start)",
     f"{POOL}_a_task_kept_from_running_gets_more_time"),
    ("memory_of_earlier_tasks", "pool.py", "    if _address_space() > full:\n        os._exit(_FULL)\n", "",
     f"{POOL}_a_task_gets_the_memory_of_the_limit_and_no_more"),
    ("workers_of_a_killed_trainer", "pool.py", "    while os.getppid() == parent:", "    while True:",
     f"{POOL}_no_process_outlives_its_parent"),
    ("names_in_order", "compare.py", "return names != sorted(names) and", "return False and",
     "test_compare.py::test_different_numbers_and_words_are_different"),
    ("unfinished_tags", "extract.py", 'else "" if opened else None', "else None",
     "test_extract.py::test_auto_prefers_box_then_hash_then_words_then_number"),
    ("whole_announcements", "extract.py", "or stated(text) or bare(whole)", "or concluded(text) or bare(whole)",
     "test_extract.py::test_what_a_mark_announces_is_taken_whole"),
    ("only_number", "conclusion.py", "if len(NUMBERS.findall(result)) == 1 else None", "",
     "test_extract.py::test_what_the_last_sentences_conclude_with_is_the_answer"),
)  # fmt: skip

RESUMED = "test_identity.py::test_a_resumed_run_refuses_other_contents"
EDITED = "test_identity.py::test_a_change_of_code_is_seen_and_of_its_looks_is_not"
COMPOSE = _of(
    "compose",
    "tests",
    ("other_contents", "../runs/run_dir.py", "if was.get(name, contents[name]) != contents[name]", "if not was",
     f"{RESUMED}[rows]"),
    ("columns_of_rows", "identity.py", "json.dumps(row, sort", 'json.dumps(row["messages"], sort', f"{RESUMED}[truths]"),
    ("numbers_of_weights", "../runs/tensor_file.py", "        digest.update(tensor_bytes(tensor.detach().cpu()))\n", "",
     f"{RESUMED}[reference]"),
    ("held_out_rows", "data.py", "setup.identity.add_rows(f", "split == 'test' or setup.identity.add_rows(f",
     f"{RESUMED}[held-out]"),
    ("modules_of_a_module", "identity.py", "            _read(imported, files)\n", "            pass\n",
     f"{EDITED}[imported]"),
    ("code_that_changed", "../trainers/base_trainer.py", "if was.get(name, now[name]) != now[name]", "if name not in was",
     "test_identity.py::test_a_resumed_run_names_the_code_that_changed"),
    ("replaced_reference", "../config/resolve.py", " and references[keys][1] == values", "",
     "test_config.py::test_what_is_derived_follows_a_changed_configuration"),
    ("secret_elsewhere", "../config/keys.py", "if reference[2] or not elsewhere", "if not elsewhere",
     "test_secrets.py::test_files_for_other_machines_name_the_variables_of_secrets"),
    ("typed_reference", "../config/resolve.py", "lambda keys, value: typed(value, annotation(config, keys))",
     "lambda keys, value: value", "test_config.py::test_what_is_derived_follows_a_changed_configuration"),
    ("options_of_a_name", "../config/resolve.py", 'name not in (None, values[section].get("name"))', "not name",
     "test_config.py::test_options_stay_until_another_name_is_given[name=dapo-options0]"),
    ("server_twice", "engines.py", "not urls or len(places) < len(urls)", "not urls",
     "test_build.py::test_no_server_or_the_same_twice_is_refused"),
    ("unfinished_model", "../runs/run_dir.py", "shutil.rmtree(leftover) if leftover.is_dir() else", "leftover.is_dir() or",
     "runs/test_run_dir.py::test_the_remains_of_a_killed_first_start_are_removed"),
)  # fmt: skip

TINKER = _of(
    "../extras/tinker/rl4llm_tinker",
    "extras/tinker/tests",
    ("tinker_betas", "models.py", "betas=options.betas, eps=options.eps, weight_decay",
     "eps=options.eps, weight_decay", f"{SERVED}steps_are_those_of_adamw_with_every_parameter"),
    ("tinker_alpha", "models.py", "alpha=ALPHA", "alpha=2 * shape.rank",
     f"{SERVED}merged_weights_have_alpha_32_whatever_the_rank"),
    ("tinker_loss_over_passes", "models.py", "summed += part.item()", "summed = part.item()",
     f"{SERVED}passes_change_neither_gradient_nor_loss"),
    ("tinker_likeliest_place", "sampling.py", "[len(tokens) - 1 :]", "[len(tokens) - 2 :]",
     f"{SERVED}sampled_tokens_are_among_their_own_likeliest"),
    ("tinker_places", "messages.py", "if shape[0] != places or len(shape)", "if len(shape)",
     f"{SERVED}shapes_are_checked_before_tensors_are_built"),
    ("tinker_idle", "service.py", "min(now - self._tidied, STILL_S)", "now - self._tidied",
     f"{SERVED}time_in_which_the_server_stood_still_ends_nothing"),
    ("tinker_address", "store.py", "return hashlib.sha256(model_id.encode()).hexdigest()[:32]", "return model_id",
     f"{SERVED}an_address_does_not_tell_who_trains"),
    ("tinker_typed", "requests.py", "    check_values(where, do, fields)\n", "",
     f"{SERVED}numbers_of_requests_are_bounded_whole_numbers"),
)  # fmt: skip

COMPAT = _of(
    "../extras/compat/rl4llm_compat",
    "extras/compat/tests",
    ("prompts_of_reset", "trl/environment.py", '"" if last.content == PLACEHOLDER else last.content', "last.content",
     "trl/test_scripts.py::test_environment_without_a_dataset_brings_the_prompts"),
    ("divided_group", "trl/joint.py", " or rows < group", "",
     "trl/test_script.py::test_what_cannot_be_said_is_refused_with_what_to_do"),
    ("installed_parts", "../../../rl4llm/core/registry.py", "in importlib.metadata.entry_points(group=group)}", "in ()}",
     "migration/test_answers.py::test_unknown_key_of_another_project_is_answered"),
    ("missing_package", "../../../rl4llm/core/registry.py", "if name in self.extras:", "if not name:",
     "../../../tests/test_extensions.py::test_a_command_of_a_missing_package_names_it"),
)  # fmt: skip
RECIPES = _of(
    "extensions/recipes",
    "tests/extensions/recipes",
    ("verify_overrides", "results.py", "elif overrides := changes(run", "elif overrides := changes([] and run",
     "test_recipes.py::test_a_repetition_is_compared_with_runs_of_its_kind"),
    ("begun_with_overrides", "command.py", "if record[key] != value:", "if False:",
     "test_recipes.py::test_finished_stages_and_data_are_not_made_again"),
)  # fmt: skip

ATTACK = "test_attacks.py::test_an_attack_does_not_work"
IN_THE_WAY = "test_attacks.py::test_what_is_in_the_way_of_tests_does_not_help"
BOMB = "test_attacks.py::test_a_bomb_ends_with_the_limit_that_it_hit"
WORKSPACES = _of(
    "extensions/workspaces",
    "tests/extensions/workspaces",
    ("ws_descriptors", "start.py", "descriptor in (0, 1, 2, *options.values())", "True",
     f"{ATTACK}[reads-it-through-inherited-descriptors]"),
    ("ws_network", "start.py", "            namespaces.new_network()", "            pass",
     f"{ATTACK}[reaches-a-port-of-the-host]"),
    ("ws_capabilities", "start.py", '"--cap-drop", "ALL"', '"--cap-add", "ALL"', f"{ATTACK}[has-a-capability]"),
    ("ws_locked", "tree.py", "os.chroot(directory)", "os.chdir(directory)",
     "test_attacks.py::test_writing_replaces_a_link_and_stays_inside"),
    ("ws_places", "tree.py", "os.path.realpath(os.path.join(place, part))", "os.path.join(place, part)",
     f"{IN_THE_WAY}[a-link-to-another-place]"),
    ("ws_memory", "keeper.py", 'if used > self.order["memory_bytes"]:', "if False:", f"{BOMB}[memory-of-many-processes]"),
    ("ws_disk", "keeper.py", "elif self.measured > running.full_at:", "elif False:", f"{BOMB}[disk]"),
    ("ws_deleted_files", "tree.py", "total = sum(deleted.values())", "total = 0", f"{BOMB}[disk-in-deleted-files]"),
    ("ws_small_files", "tree.py", "max(SMALLEST_FILE, _blocks(entry))", "_blocks(entry)", f"{BOMB}[many-empty-files]"),
    ("ws_dies_with_keeper", "keeper.py", "        namespaces.end_with_parent(keeper)\n        namespaces.prctl",
     "        namespaces.prctl", "test_workspaces.py::test_nothing_is_left_of_a_killed_trainer"),
    ("ws_other_starts", "keeper.py", 'self._kill("another start")', "self.running = None",
     "test_attacks.py::test_no_process_survives_its_start"),
    ("ws_archives", "unpack.py", 'os.chroot(".")', "pass", "test_images.py::test_an_archive_does_not_write_outside"),
    ("ws_private", "network.py", "if all(ipaddress", "if any(ipaddress",
     "test_network.py::test_a_name_of_a_private_address_is_not_reached"),
    ("ws_names", "network.py", '(url.hostname or "") in names', "True",
     "test_network.py::test_the_proxy_refuses_what_is_not_on_its_list"),
)  # fmt: skip

MUTANTS = {
    mutant.name: mutant
    for mutant in chain(
        ALGORITHMS,
        DATA,
        TRAINERS,
        ENVS,
        BACKENDS,
        INFERENCE,
        SYNC,
        SERVERS,
        RUNTIME,
        REMOTE,
        AGENTS,
        RECIPES,
        ADAPTERS,
        SANDBOX,
        WORKSPACES,
        REWARDS,
        COMPOSE,
        TINKER,
        COMPAT,
    )
}
