"""Serves many requests of mixed length with SGLang's engine; run as a script by `test_gpu_tokens`.

    python many_requests.py MODEL OPTIONS TARGET

OPTIONS are JSON: keyword arguments of SGLang's `Engine`, and `requests`, how many. Writes JSON to TARGET: of
each request the output tokens, the logarithms of their probabilities, and how far each was ahead of the next;
how many prompt tokens the prefix cache had; how many requests were retracted is in the log.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

TEXT = Path(json.__file__).read_bytes() + Path(random.__file__).read_bytes()


def requests(count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, many of which begin alike, and tokens to generate."""
    chance = random.Random(7)
    starts = [chance.randrange(len(TEXT) - 400) for _ in range(count // 8)]
    prompts, lengths = [], []
    for _ in range(count):
        begin = chance.choice(starts)
        prompts.append(list(TEXT[begin : begin + chance.randrange(1, 300)]))
        lengths.append(chance.randrange(1, 97))
    return prompts, lengths


def main(model: str, options: dict[str, Any], target: str) -> None:
    from sglang.srt.entrypoints.engine import Engine

    prompts, lengths = requests(int(options.pop("requests")))
    engine = Engine(model_path=model, skip_tokenizer_init=True, **options)
    results = engine.generate(
        input_ids=prompts,
        sampling_params=[
            {"max_new_tokens": length, "temperature": 0, "ignore_eos": True} for length in lengths
        ],
        return_logprob=True,
        top_logprobs_num=2,
    )
    time.sleep(2)  # An idle scheduler looks for slots and tokens that nobody owns, and ends if it finds any.
    [last] = engine.generate(input_ids=prompts[:1], sampling_params=[{"max_new_tokens": 2, "temperature": 0}])
    assert len(last["output_ids"]) == 2
    engine.shutdown()
    infos = [result["meta_info"] for result in results]
    found = {
        "outputs": [result["output_ids"] for result in results],
        "logs": [[entry[0] for entry in info["output_token_logprobs"]] for info in infos],
        "ahead": [[top[0][0] - top[1][0] for top in info["output_top_logprobs"]] for info in infos],
        "cached": sum(info["cached_tokens"] for info in infos),
    }
    Path(target).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
