# A command for verl, with what its users' scripts have: variables, defaults, arrays, a branch and further arguments.
set -x

MODEL=${MODEL:-Qwen/Qwen3-4B}
NGPUS=${NGPUS:-8}
BATCH=512
LENGTH=$((1024 * 2))

case "${DEVICE}" in
    npu)
        NGPUS=16
        ;;
esac

DATA=(
    algorithm.adv_estimator=grpo
    data.train_files=/data/gsm8k/train.parquet
    data.val_files="['/data/gsm8k/test.parquet', '/data/math/test.parquet']"
    data.train_batch_size=${BATCH}
    data.max_prompt_length=1024     # tokens
    data.max_response_length=${LENGTH}
    data.filter_overlong_prompts=True
    data.truncation='error'
)

python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path=${MODEL} \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    trainer.logger='["console","wandb"]' \
    trainer.experiment_name=qwen3 \
    trainer.n_gpus_per_node=${NGPUS} \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 $@
