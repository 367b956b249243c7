"""Forty-one ways in which other trainers silently went wrong, and the tests here that would catch each.

The list was gathered from the issue trackers of TRL, verl, OpenRLHF, NeMo-RL, unsloth, peft, transformers, vLLM and others.
This file checks that every entry has its tests and that they exist; what a test shows is in its own docstring.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PITFALLS = {
    1: ("ratio is not 1 at the first step: temperature in the sampler only", "rollout:reported_logps_and_entropies "
        "learner:the_first_update_has_ratio_one logps:temperature_scales train:a_run_learns"),
    2: ("importance ratio of 2 at T != 1: raw log-probs against scaled ones", "learner:the_samplers_log_probs "
        "rollout:reported_logps"),
    3: ("a truncated sampler is not the policy that is scored", "config:a_wrong_flag_ends"),
    4: ("infinite at T -> 0", "sampling:greedy_takes sampling:extreme_temperatures"),
    5: ("log-probs from bf16 logits are off by 0.03 nats", "logps:fp32_stays_close sampling:logp_is_exact"),
    6: ("sequence-level importance weights saturate", "grpo:tis_weight_is_truncated grpo:mismatch_metrics train:a_run_learns"),
    7: ("padding without positions", "model:packed_sequences_do_not_see learner:loss_and_every_adapter_gradient"),
    8: ("the end token is masked away, or what follows it is trained", "grpo:the_end_token_trains"),
    9: ("one of several end ids is checked", "rollout:any_of_several_stop_ids loader:every_end_token"),
    10: ("ids that no text has are sampled", "rollout:ids_beyond_the_tokenizer logps:ids_beyond_the_tokenizer "
         "model:padded_vocabulary"),
    11: ("completions are decoded and tokenised again", "learner:the_samplers_log_probs rollout:greedy_equals_transformers"),
    12: ("two beginnings of text, or none", "tasks:a_prompt_has_one_beginning tasks:prompt_ids_are_transformers"),
    13: ("prompts are silently cut", "tasks:prompts_that_are_too_long"),
    14: ("the KV cache overflows by one", "rollout:cached_logits_equal_uncached rollout:no_prompts_one_token_prompts"),
    15: ("the adapter never reaches the rollout", "rollout:the_rollout_follows_an_adapter"),
    16: ("base weights drift through merging and unmerging", "lora:a_step_moves_the_adapter train:the_frozen_base"),
    17: ("an adapter is merged into 4 bits and lost", "merge:transformers_computes_the_trained_logits"),
    18: ("an adapter is merged into weights that it was not trained on", "merge:merging_into_the_original"),
    19: ("tied embeddings are lost or doubled", "loader:logits_are_those merge:transformers_computes"),
    20: ("a reload is silently the base", "lora:save_and_load_give_the_same lora:missing_extra_and_damaged"),
    21: ("KL against the base though the run began from an adapter", "train:the_adapter_of_a_run_starts "
         "learner:reference_is_the_adapter_off"),
    22: ("beta is ignored", "grpo:beta_changes_the_gradient"),
    23: ("checkpointing with frozen inputs leaves adapters without gradients", "model:checkpointing_changes_no_gradient "
         "learner:checkpointed_layers"),
    24: ("dropout makes two forwards differ", "learner:two_forwards_are_equal"),
    25: ("loss 0 at the first step is normal, a zero gradient is not", "grpo:the_first_step_has_its_closed_form"),
    26: ("equal rewards get a huge advantage from rounding", "grpo:equal_rewards_give_exact_zeros"),
    27: ("groups without a signal change the denominator unsaid", "learner:answers_without_an_advantage "
         "grpo:kl_is_exactly_zero"),
    28: ("dynamic sampling without end", "train:dynamic_sampling_is_bounded grpo:dynamic_sampling_keeps"),
    29: ("the gradient depends on the micro-batch size", "learner:gradients_do_not_depend_on_the_token "
         "grpo:micro_batches_add_up"),
    30: ("masked completions stay in the denominator; all masked gives NaN", "grpo:masked_answers_leave grpo:all_masked_is"),
    31: ("finite loss, NaN gradient from masked positions", "grpo:what_stands_at_masked_positions"),
    32: ("k3 overflows", "grpo:k3_survives"),
    33: ("out of memory in log-softmax", "logps:never_more_than_the_stated"),
    34: ("completions of different prompts are mixed in a group", "grpo:groups_do_not_see_each_other "
         "rollout:a_sample_depends_on_nothing"),
    35: ("resuming changes data or randomness", "train:six_steps_are_three learner:six_steps_equal_three"),
    36: ("a half-written checkpoint is taken for the latest", "checkpoint:a_damaged_checkpoint checkpoint:kill_9"),
    37: ("identical or unreproducible samples", "sampling:streams_differ rollout:members_of_a_group_differ"),
    38: ("a grader hangs, or fails off the main thread", "rewards:nothing_that_is_answered_hangs rewards:grading_works_off"),
    39: ("lists, empty answers and open boxes earn reward", "rewards:a_list_of_candidates rewards:no_text_without"),
    40: ("a non-finite gradient reaches the weights", "learner:a_non_finite_gradient"),
    41: ("a format that the grader does not know loses right answers", "rewards:every_case_is_graded_right"),
}


def test_all_forty_one_are_here():
    assert list(PITFALLS) == list(range(1, 42))


@pytest.mark.parametrize("number", PITFALLS)
def test_each_pitfall_has_tests_that_exist(number):
    for reference in PITFALLS[number][1].split():
        file, start = reference.split(":")
        tree = ast.parse((TESTS / f"test_{file}.py").read_text())
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert any(name.startswith(f"test_{start}") for name in names), reference
