"""Which known name a wrong one means: misspelt, of an earlier version, or of another framework."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from rollouts.types import Fields


def nearest_names(
    name: str, candidates: Iterable[str], *, count: int = 3, at_least: float = 0.6
) -> list[str]:
    """At most `count` candidates that look like `name`, the nearest first; `at_least` from 0 to 1 (equal).
    Capitals and dashes do not matter.
    """
    return difflib.get_close_matches(name.lower().replace("-", "_"), list(candidates), count, at_least)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message that names the candidate most like `name`; empty if none is."""
    close = nearest_names(name, candidates, count=1)
    return f"; did you mean {close[0]}?" if close else ""


# --- settings -----------------------------------------------------------------------------------------------

# Settings of earlier versions, by as much of the end of their dotted names as tells them apart, and what
# replaces them. A resolved config that has one stays readable.
GONE = """
engine.admin_key_env: start SGLang with --api-key alone
engine.silence_s: a server without any progress for 120 s is suspected
optim.eps: it is 1e-8
output.keep_best: with keep_checkpoints and [eval] the best checkpoint always stays
reference.ema_decay: set policy_weight = 1 - ema_decay
reward_model.centring: it is 0.01
rl.share_prefix: a prompt is computed once wherever that is exact
rollout.reward_workers: there is one process per core that this process may use (taskset limits them)
rl.skip_zero_advantage: samples without advantage are left out wherever the gradient stays the same
distributed.max_restarts: start it with torchrun --nproc-per-node=N --max-restarts=M
distributed.reduce_each_micro_batch: cpu_offload sums gradients after every micro-batch too
output.metric_aliases: trackers get metrics under the names of docs/run_directory.md
reference.server_model: a reference's server serves one model, whose name is asked for
reference.server: the server says what it is
reference.api_key_env: the key is in the environment variable VLLM_API_KEY or SGLANG_API_KEY
reference.every: write update = "ema(every=4)"
reference.policy_weight: write update = "ema(policy_weight=0.05)"
engine.api_key_env: the key is in the environment variable VLLM_API_KEY or SGLANG_API_KEY
engine.dtype: write args = ["--dtype", "float32"]
engine.context_length: write args = ["--max-model-len", "1024"], or "--context-length" of SGLang
engine.max_concurrency: a server gets at most 256 requests at once, fewer while it answers 429 or 503
engine.down_limit_s: without any server in service the run saves and stops after 900 s
output.token_arrays_gib: per-token arrays of the newest steps are kept up to 4 GiB
data.subset: write dataset = "openai/gsm8k:main"
data.streaming: a dataset of the hub is streamed if size is set
data.name: a source is called by its file, dataset or function
optim.beta1: it is 0.9
optim.min_lr_ratio: linear and cosine end at 0
optim.max_nonfinite_steps: it is 3
sft.thinking: assistant turns train with their thinking; leave reasoning_content out of the rows
rl.kl_control_params: write kl_control = "proportional(target=6, horizon=1000)"
rl.importance_cap: write loss_params = { importance_cap = 3 }
changes.importance_cap: write loss_params = { importance_cap = 3 }
critic.clip: it is 0.2
preference.reference: rows are scored once, a reference that moves scores every batch
rollout.reward_combine: combine the parts in the reward function, or weigh them by reward_weights
rollout.reward_memory_gib: a process that runs rewards may have 4 GiB
"""

# Our settings (several where two stages have one, or where one of theirs is two of ours), what differs (in
# brackets), and below them their names: as many of the last parts of a dotted name as tell it apart. They are
# suggested, never accepted, for what they count often differs.
NAMES_ELSEWHERE = """
rl.rollout.samples_per_prompt:
    group_size num_generations n_samples_per_prompt num_samples rollout_n rollout.n
    actor_rollout_ref.rollout.n rollouts_per_example
    n_samples gconfig.n_samples num_generations_per_prompt grpo.num_generations_per_prompt sampling.n
    generator.n_samples_per_prompt
    samples_per_group num_return_sequences num_samples_per_prompt
eval.samples_per_prompt:
    n_samples_per_eval_prompt eval_n_samples_per_prompt val_kwargs.n actor_rollout_ref.rollout.val_kwargs.n
rl.rollout.num_prompts:
    data.train_batch_size trainer.train_batch_size rollout_batch_size prompts_per_step num_prompts_per_step
    grpo.num_prompts_per_step
    train_dataset.batch_size num_unique_prompts_rollout groups_per_batch prompts_per_batch data.gen_batch_size
rl.rollout.over_sampling (as a multiple of num_prompts):
    gen_batch_size
rl.rollout.over_sampling (there a number of prompts, here a multiple of num_prompts):
    over_sampling_batch_size
rl.rollout.over_sampling:
    oversampling_factor
rl.rollout.num_prompts sft.batch_size (in RL it counts prompts, in SFT conversations):
    batch_size
rl.rollout.num_prompts sft.batch_size (it counts samples, ours prompts: divide it by samples_per_prompt):
    train_batch_size
rl.rollout.num_prompts (there it counts samples, here prompts: divide by samples_per_prompt):
    generation_batch_size
rl.rollout.num_prompts sft.batch_size (it counts samples a step, here num_prompts * samples_per_prompt):
    global_batch_size
rl.rollout.num_prompts (it counts samples a step, which are num_prompts * samples_per_prompt here):
    train_global_batch_size policy.train_global_batch_size
rl.minibatches (there the size of a part, here the number of parts that each pass divides a batch into):
    ppo_mini_batch_size policy_mini_batch_size
rl.rollout.num_prompts sft.batch_size (there samples, here prompts; what fits at once is micro_batch_tokens):
    per_device_train_batch_size
rl.micro_batch_tokens sft.micro_batch_tokens (gradients accumulate as needed; so many tokens fit at once):
    gradient_accumulation_steps
rl.micro_batch_tokens sft.micro_batch_tokens (there it counts rows, here padded tokens of one forward pass):
    micro_train_batch_size micro_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size_per_gpu
    train_micro_batch_size
engine.max_rows:
    micro_rollout_batch_size max_num_seqs max_concurrent_rollouts
rl.micro_batch_tokens sft.micro_batch_tokens:
    ppo_max_token_len_per_gpu max_tokens_per_gpu max_tokens_per_mb mb_spec.max_tokens_per_mb
rl.rollout.max_new_tokens eval.max_new_tokens:
    max_tokens max_completion_length max_completion_tokens max_response_len max_response_length
    data.max_response_length
    rollout_max_response_len max_generate_length generate_max_len gconfig.max_new_tokens response_length
    sampling_params.max_generate_length
eval.max_new_tokens:
    eval_max_response_len
rl.rollout.max_new_tokens (prompts are never cut; both must fit the model's context):
    max_prompt_length prompt_max_len rollout_max_prompt_len
sft.max_length:
    max_seq_length max_seq_len seq_len max_len
sft.max_length (of SFT; in RL prompt and max_new_tokens must fit the model's context):
    max_total_sequence_length
rl.rollout.temperature:
    rollout_temperature gconfig.temperature
eval.temperature:
    eval_temperature val_kwargs.temperature
rl.optim.lr sft.optim.lr:
    learning_rate actor.optim.lr actor_learning_rate optimizer.lr actor_rollout_ref.actor.optim.lr
    policy.optimizer.kwargs.lr
    policy.optimizer_config.lr optimizer_config.lr
rl.optim.schedule sft.optim.schedule:
    lr_scheduler_type lr_scheduler lr_decay_style
rl.optim.warmup_steps sft.optim.warmup_steps:
    lr_warmup_steps num_warmup_steps lr_warmup_iters
rl.optim.warmup_steps sft.optim.warmup_steps (there it is a share of all steps, here a number of steps):
    warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio warmup_steps_proportion lr_warmup_fraction
rl.optim.max_grad_norm sft.optim.max_grad_norm:
    clip_grad grad_clip gradient_clip gradient_clipping max_norm
rl.optim.beta2 sft.optim.beta2:
    adam_beta2 optim.betas2
rl.optim.weight_decay sft.optim.weight_decay:
    l2 wd
rl.steps sft.steps:
    max_steps num_steps num_rollout total_training_steps trainer.total_training_steps max_num_steps
    grpo.max_num_steps total_train_steps
    train_iters
rl.epochs sft.epochs:
    num_train_epochs total_epochs num_epochs max_epochs num_epoch
rl.epochs:
    num_episodes
output.dir:
    output_dir save_path default_local_dir ckpt_path save_dir checkpoint_dir run_dir fileroot log_path
output.checkpoint_every:
    save_steps save_interval save_freq trainer.save_freq ckpt.interval ckpt_interval save_period
    checkpointing.save_period
    saver.freq_steps
output.keep_checkpoints:
    save_total_limit keep_last ckpt.keep_last max_actor_ckpt_to_keep max_ckpt_num
output.keep_checkpoints (the newest stay, not the best):
    keep_top_k
rl.eval_every sft.eval_every:
    eval_steps eval_interval test_freq trainer.test_freq eval.interval val_period evaluator.freq_steps
    eval_freq
name:
    run_name experiment_name trainer.experiment_name
seed:
    random_seed shuffle_seed rollout_seed
output.samples_per_step:
    num_completions_to_print log_completions
rl.kl_coef (of the KL term, not of AdamW):
    beta
rl.kl_coef (as a term of the loss it needs kl_in = "loss" and kl_estimator = "k2", "k3" or "exact"):
    kl_loss_coef actor.kl_loss_coef reference_policy_kl_penalty
rl.kl_in (set rl.kl_coef above 0 to turn the term on; there is no other switch, and kl_in = "loss"):
    use_kl_loss
rl.kl_coef:
    init_kl_coef kl_penalty_coef algorithm.kl_ctrl.kl_coef kl_ctrl.kl_coef kl_ctl kl_beta kl_coeff
rl.kl_estimator:
    kl_loss_type kl_penalty kl_estimator_type
rl.kl_in (set rl.kl_coef above 0 to turn the term on; there is no other switch):
    use_kl_in_reward
rl.clip_low rl.clip_high (one number there, two here):
    epsilon eps_clip clip_range cliprange clip_ratio actor.clip_ratio
rl.clip_low:
    epsilon_low clip_ratio_low eps_clip_low ratio_clip_min
rl.clip_high:
    epsilon_high eps_clip_high clip_ratio_high ratio_clip_max eps_clip_higher
rl.advantage:
    advantage_estimator adv_estimator algorithm.adv_estimator scale_rewards norm_adv_by_std_in_grpo
    normalize_rewards
rl.advantage (write advantage = "rloo"):
    use_leave_one_out_baseline
rl.loss:
    loss_type loss_fn policy_loss_type policy_loss loss_mode
rl.normalise_by:
    loss_agg_mode loss_reduction token_level_loss normalize_by
rl.mask_truncated:
    mask_truncated_completions overlong_filtering apply_overlong_filtering overlong_filter
rl.updates_per_batch:
    num_iterations ppo_epochs num_updates_per_batch update_epochs_per_batch
rl.minibatches:
    ppo_n_minibatches num_mini_batches n_minibatches
rl.distillation.teacher:
    teacher_model_name_or_path teacher_model_path teacher_model
rl.kl_stop (nats per token, asked after every update):
    target_kl kl_target_early_stop
rl.kl_control (write kl_control = "proportional(target=6, horizon=1000)"):
    kl_horizon kl_target kl_ctrl.horizon kl_ctrl.target_kl kl_controller
    kl_ctrl.type algorithm.kl_ctrl.type kl_controller_type
rl.max_staleness (counted in trainer steps; the default of 0 is strictly on-policy):
    max_off_policy_steps max_head_offpolicyness max_async_level async_level staleness_threshold
    max_staleness_steps
    max_trajectory_age_steps max_policy_age max_lag async_steps
rl.sync_every:
    update_weights_interval weight_sync_interval vllm_sync_interval sync_steps
rl.loss_params (write loss_params = { importance_cap = 3 }, with recompute_old = true):
    tis_clip tis_imp_ratio_cap vllm_importance_sampling_cap behav_imp_weight_cap
rl.recompute_old:
    use_tis vllm_importance_sampling_correction recompute_logprob
rl.rollout.reward eval.reward (write module:function or file.py:function):
    reward_fn reward_func reward_funcs reward_function custom_rm_path rm_type reward_name rm_path
    remote_rm_url reward_model_path
    custom_reward_function.path
rl.rollout.generate (write module:function or file.py:function):
    agent_func_path custom_generate_function_path rollout_function_path rollout_func workflow generate_fn
rl.rollout.group_reward (write module:function or file.py:function):
    group_rm
rl.rollout.reward_weights:
    reward_func_weights rewards_weights
rl.rollout.filters (a list):
    dynamic_sampling_filter_path dynamic_filter_fn
rl.rollout.filters (a list of names):
    filter_groups dynamic_filtering dynamic_sampling
rl.rollout.filters (write filters = ["check_reward_nonzero_std"]):
    filter_groups.enable
rl.rollout.ranker:
    over_sampling_filter_path
rl.rollout.max_attempts:
    max_num_gen_batches dynamic_sampling.max_sample_batches
rl.rollout.reward_timeout_s:
    reward_timeout timeout
model.name:
    model_name model_name_or_path model_path hf_checkpoint model.path actor.path pretrain
    actor_rollout_ref.model.path policy.model_name
    policy.model.path tokenizer_path ref_load
model.autocast (the weights stay float32 and the arithmetic is "bfloat16", "off" or "auto"):
    torch_dtype dtype bf16 fp16 precision mixed_precision
model.gradient_checkpointing:
    enable_gradient_checkpointing activation_checkpointing recompute_granularity activation_recomputation
model.compile:
    torch_compile use_torch_compile compile_model model.compile_config
model.chat_template (always applied; this replaces the tokenizer's own):
    apply_chat_template
model.chat_template:
    chat_template_path
model.template_params:
    chat_template_kwargs apply_chat_template_kwargs enable_thinking
rl.data.path sft.data.path (with kind = "jsonl" or "parquet"; a hub dataset is kind = "hf" with dataset):
    prompt_data train_files data.train_files dataset_path train_data_path input_data train_dataset.path
rl.data.dataset sft.data.dataset:
    dataset_name
rl.data.dataset sft.data.dataset (write dataset = "openai/gsm8k:main"):
    dataset_config dataset_config_name
rl.data.split sft.data.split:
    train_split dataset_train_split
eval.data.path (with kind = "jsonl" or "parquet"; a hub dataset is kind = "hf" with dataset):
    val_files data.val_files eval_prompt_data eval_dataset valid_dataset.path
rl.data.columns sft.data.columns (write columns = { prompt = "question" } with the column's name):
    prompt_key input_key dataset_text_field
rl.data.columns sft.data.columns (write columns = { answer = "solution" } with the column's name):
    label_key answer_key
rl.data.size sft.data.size:
    train_max_samples max_samples max_train_samples
rl.data.weight sft.data.weight:
    prompt_data_probs
rl.data.weight:
    sampling_ratio
sft.train_on:
    assistant_only_loss completion_only_loss
engine.kind:
    inference_backend rollout.name
engine.mode:
    colocate colocate_all vllm_mode
engine.urls (a list of http:// addresses):
    vllm_server_base_url vllm_server_host base_url router_url sglang_router_ip
engine.count:
    vllm_num_engines num_engines num_inference_engines rollout_num_engines
engine.args (a list of the server's own arguments, like ["--gpu-memory-utilization", "0.8"]):
    vllm_dtype rollout_dtype max_model_len vllm_max_model_length max_model_length
    vllm_gpu_memory_utilization gpu_memory_utilization sglang_mem_fraction_static enforce_eager
    vllm_enable_prefix_caching
engine.transport:
    weight_sync_backend vllm_sync_backend weight_broadcast
distributed.ranks (processes on this machine; on several machines start it by torchrun):
    n_gpus_per_node gpus_per_node num_gpus_per_node actor_num_gpus_per_node trainer.n_gpus_per_node
    nproc_per_node num_gpus world_size
distributed.shard_size:
    fsdp_size data_parallel_shard_degree dp_shard_size
distributed.cpu_offload (weights, gradients and optimizer state together):
    fsdp_cpu_offload param_offload optimizer_offload offload_params offload_optimizer
deterministic:
    full_determinism deterministic_mode batch_invariant
"""

REMOVED = dict(re.findall(r"^(\S+): (.+)$", GONE, re.MULTILINE))
ALIASES = {  # their name: (our dotted keys, what differs in brackets)
    name: (keys.split(), note)
    for keys, note, names in re.findall(
        r"^(\w.*?)( \(.*\))?:\n((?:    .*\n)+)", NAMES_ELSEWHERE, re.MULTILINE
    )
    for name in names.split()
}


def find_name(table: Fields, dotted: str) -> Any:
    """The entry of as many last parts of the name as the table knows; None if it knows none."""
    parts = dotted.lower().replace("-", "_").split(".")
    names = (".".join(parts[start:]) for start in range(len(parts)))
    return next((table[name] for name in names if name in table), None)
