"""vLLM's side of engine_cpu: a program for the Python that has vLLM, which imports nothing of ours.

Started as `python engine_cpu_vllm.py MODEL_DIRECTORY WORKLOAD.json`; the workload is {"prompts": [lists of
ids], "lengths": [of the answers], "dtype": that of the weights}. For each line on its input it generates all
of it, in this process, and answers with a line {"wall_s": …, "cpu_s": …, "tokens": …}. The first answer,
{"ready": version}, comes when the model is loaded and has made two tokens of each.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    import vllm  # pyright: ignore[reportMissingImports]

    workload: Any = json.loads(Path(sys.argv[2]).read_text("utf-8"))
    prompts = [{"prompt_token_ids": ids} for ids in workload["prompts"]]
    sampling = [
        vllm.SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=length, logprobs=0)
        for length in workload["lengths"]
    ]
    model = vllm.LLM(
        sys.argv[1],
        dtype=workload["dtype"],
        max_model_len=256,
        max_num_seqs=len(prompts),
        enforce_eager="--eager" in sys.argv,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )

    def generate() -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        assert all(len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids) for output in outputs)
        return {**took, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    model.generate(
        prompts,
        vllm.SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=2, logprobs=0),
        use_tqdm=False,
    )
    print(json.dumps({"ready": vllm.__version__}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(generate()), file=answers, flush=True)


if __name__ == "__main__":
    main()
