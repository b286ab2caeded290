"""One engine of TensorRT-LLM, timed on request: a process of `bench e2e`.

Orders and answers are those of `sglang_engine`, without `prefix` and `profile`; besides them `tokens`, with
`prompts` and tokens of `output`, asks for the greedy tokens of prompts. The engine is started as trtllm-serve
starts it: the folder of the plug-in is imported first, then the engine's YAML file is merged, then the engine
is made.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from replayssm.cli.bench.packages import installed
from replayssm.cli.bench.sglang_engine import MARK, Prompts, step_times

PACKAGES = ("replayssm-adapters", "tensorrt_llm", "torch", "triton", "transformers")


def parser() -> argparse.ArgumentParser:
    """The process's options."""
    options = argparse.ArgumentParser("trtllm_engine")
    options.add_argument("--model", required=True, type=Path, help="folder of the model")
    options.add_argument("--config", type=Path, help="the engine's YAML file, as trtllm-serve takes it")
    options.add_argument("--replay", action="store_true", help="decode with the adapter")
    return options


def settings(config: Path | None) -> dict[str, Any]:
    """What the engine's YAML file sets."""
    return {} if config is None else yaml.safe_load(config.read_text(encoding="utf-8")) or {}


def draft_tokens(given: dict[str, Any]) -> int:
    """T of a step with these settings."""
    speculation = given.get("speculative_config") or {}
    names = ("max_draft_len", "num_nextn_predict_layers")
    return 1 + max(int(speculation.get(name) or 0) for name in names)


def vocabulary(model: Path) -> int:
    """Tokens that the model knows."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["vocab_size"])


def start(model: Path, given: dict[str, Any], replay: bool) -> Any:
    """The engine, with the adapter where it is asked for."""
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi.llm_args import update_llm_args_with_extra_dict

    if replay:
        from tensorrt_llm.tools.importlib_utils import import_custom_module_from_dir

        from replayssm.adapters.trtllm import module_dir

        import_custom_module_from_dir(Path(str(module_dir.__file__)).parent / "replayssm_trtllm")
    arguments = {"model": str(model), "skip_tokenizer_init": True}
    return LLM(**update_llm_args_with_extra_dict(arguments, given))


def run(engine: Any, prompts: Prompts, count: int) -> list[Any]:
    """Greedy results of so many new tokens each, whatever they are."""
    from tensorrt_llm import SamplingParams

    sampling = SamplingParams(max_tokens=count, top_k=1, ignore_eos=True, end_id=-1, pad_id=0)
    results: list[Any] = engine.generate(prompts, sampling, use_tqdm=False)
    return results


def info(result: Any) -> dict[str, Any]:
    """What `step_times` reads of a result; the prompt's pass is one of the engine's iterations."""
    return {
        "completion_tokens": len(result.outputs[0].token_ids),
        "spec_verify_ct": result.decoding_iter - 1,
    }


def main(arguments: Sequence[str], orders: Iterable[str]) -> None:
    """Start the engine, carry out orders, end it."""
    options = parser().parse_args(arguments)
    given = settings(options.config)
    engine = start(options.model, given, options.replay)
    known, chance = vocabulary(options.model), random.Random(0)
    draft, most = draft_tokens(given), engine.args.max_batch_size

    def prompts(count: int, length: int) -> Prompts:
        return [[chance.randrange(10, known) for _ in range(length)] for _ in range(count)]

    def generate(asked: Prompts, count: int) -> list[dict[str, Any]]:
        return [info(result) for result in run(engine, asked, count)]

    for line in orders:
        order = json.loads(line)
        match order["order"]:
            case "facts":
                versions = {"python": sys.version.split()[0], **installed(*PACKAGES)}
                answer: dict[str, Any] = {"gpu": _gpu(), "versions": versions, "vocabulary": known}
            case "step" if order["batch"] > most:
                refused = f"batch {order['batch']}: the engine runs at most {most} requests at a time"
                answer = {"refused": refused}
            case "step":
                answer = {**step_times(generate, prompts, order, draft), "max_requests": most}
            case "tokens":
                results = run(engine, order["prompts"], order["output"])
                answer = {
                    "tokens": [list(result.outputs[0].token_ids) for result in results],
                    "iterations": sum(result.decoding_iter for result in results),
                }
        print(MARK + json.dumps(answer), flush=True)
    engine.shutdown()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin)
