"""Serves a few requests with SGLang's engine and prints what came of them; run as a script by `test_engine`.

    python engine_run.py MODEL OPTIONS

OPTIONS are JSON: keyword arguments of SGLang's `Engine`, and `scale`, by which outputs are longer. Prints one
line `RESULT {...}`: of each request the output tokens, the logarithms of their probabilities, how many tokens
the prefix cache had, and with speculation in how many steps it was verified.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = (
    "The state of a sequence is",
    "The state of a model is",
    "def decode(self, tokens):\n    ",
    "Once upon a time there was",
    "for layer in layers:",
    "The state",
)


def main(model: str, options: dict[str, Any]) -> None:
    from sglang.srt.entrypoints.engine import Engine

    scale = int(options.pop("scale", 1))
    engine = Engine(
        model_path=model,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        disable_cuda_graph=True,
        log_level="info",
        **{"max_running_requests": 4, "max_mamba_cache_size": 24, "max_total_tokens": 1000, **options},
    )
    first = [list(text.encode()) for text in PROMPTS]
    outputs, logs, cached, rounds = [], [], [], []
    # The second time prompts go on where a request ended, or in the middle of it.
    for _ in range(2):
        lengths = [{"max_new_tokens": scale * (12 + 9 * (row % 4)), "temperature": 0} for row in range(6)]
        results = engine.generate(input_ids=first, sampling_params=lengths, return_logprob=True)
        outputs += [result["output_ids"] for result in results]
        logs += [[entry[0] for entry in result["meta_info"]["output_token_logprobs"]] for result in results]
        cached += [result["meta_info"]["cached_tokens"] for result in results]
        rounds += [result["meta_info"].get("spec_verify_ct", 0) for result in results]
        pairs = zip(first, results, strict=True)
        first = [
            [*prompt, *result["output_ids"][: -1 - 5 * (row % 2)], *b" and"]
            for row, (prompt, result) in enumerate(pairs)
        ]
    engine.shutdown()
    found = {"outputs": outputs, "logs": logs, "cached": cached, "rounds": rounds}
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
