"""Keeps SGLang's engine busy with requests that come, share prefixes, end early or are aborted; a script.

    python churn_run.py MODEL OPTIONS TARGET

OPTIONS are JSON: keyword arguments of SGLang's `Engine`; `requests`, how many at least; `seconds`, how long
at least; `at_once`, how many wait for an answer at a time. Writes JSON to TARGET: outputs of a few requests
before and behind all others, what `witness` saw at both times and while it was busy, how many requests there
were, ended or aborted, how many tokens came and how many the prefix cache had, and log probabilities that are
no numbers.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

TEXT = Path(json.__file__).read_bytes() + Path(random.__file__).read_bytes()
LONGEST = 400
"""Tokens of a prompt."""
PATIENCE = 30.0
"""Seconds in which an engine ends what was aborted."""


class Churn:
    """Requests drawn at random, of which some go on where another has ended."""

    def __init__(self, engine: Any, seed: int = 3) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.ended: list[list[int]] = []
        self.found = {"requests": 0, "aborted": 0, "tokens": 0, "cached": 0, "no_numbers": 0}

    def prompt(self) -> list[int]:
        """A piece of text, or an earlier request with more of it."""
        begin = self.chance.randrange(len(TEXT) - LONGEST)
        if self.ended and self.chance.random() < 0.5:
            earlier = self.chance.choice(self.ended[-20:])
            more = TEXT[begin : begin + self.chance.randrange(1, 30)]
            return [*earlier[: self.chance.randrange(1, LONGEST)], *more]
        return list(TEXT[begin : begin + self.chance.randrange(1, 120)])

    async def one(self) -> None:
        """A request, which is aborted after a few tokens or runs to its end."""
        prompt, length = self.prompt(), self.chance.randrange(1, 60)
        stop = self.chance.randrange(1, length + 1) if self.chance.random() < 0.25 else 0
        name = str(self.found["requests"])
        self.found["requests"] += 1
        wanted = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        chunks = await self.engine.async_generate(
            input_ids=prompt, sampling_params=wanted, rid=name, stream=True, return_logprob=True
        )
        info: dict[str, Any] = {"cached_tokens": 0, "completion_tokens": 0, "output_token_logprobs": []}
        output: list[int] = []
        aborted = False
        async for chunk in chunks:  # The one that ends an aborted request has little in it.
            info |= chunk["meta_info"]
            output = max(output, chunk["output_ids"] or [], key=len)
            if stop and not aborted and len(output) >= stop:
                self.engine.tokenizer_manager.abort_request(rid=name)
                aborted = True
        self.found["aborted"] += info["finish_reason"]["type"] == "abort"
        self.found["tokens"] += len(output)
        self.found["cached"] += info["cached_tokens"]
        logs = [entry[0] for entry in info["output_token_logprobs"]]
        self.found["no_numbers"] += sum(not math.isfinite(log) for log in logs)
        self.ended.append([*prompt, *output])

    async def run(self, requests: int, until: float, at_once: int) -> None:
        """So many at a time, until there were enough and the time is over."""

        async def client() -> None:
            while self.found["requests"] < requests or time.monotonic() < until:
                await self.one()

        await asyncio.gather(*(client() for _ in range(at_once)))


def main(model: str, options: dict[str, Any], target: str) -> None:
    from sglang.srt.entrypoints.engine import Engine

    requests, at_once = int(options.pop("requests")), int(options.pop("at_once"))
    seconds = float(options.pop("seconds", 0))
    engine = Engine(model_path=model, skip_tokenizer_init=True, **options)
    loop = engine.loop

    def held() -> dict[str, int]:
        """Of an engine at rest, without what its prefix cache keeps."""
        until = time.monotonic() + PATIENCE
        while not engine.flush_cache().success:  # It refuses while requests are there.
            assert time.monotonic() < until, "an engine without work did not come to rest"
            time.sleep(0.1)
        [state] = engine.get_server_info()["internal_states"]
        return dict(state["held"])

    def few() -> list[list[int]]:
        prompts = [list(TEXT[100 * row : 100 * row + 20 + row]) for row in range(6)]
        wanted = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
        return [result["output_ids"] for result in engine.generate(input_ids=prompts, sampling_params=wanted)]

    before, first = held(), few()
    churn = Churn(engine)
    loop.run_until_complete(churn.run(requests, time.monotonic() + seconds, at_once))
    after, last = held(), few()
    engine.shutdown()
    found = {**churn.found, "before": before, "after": after, "first": first, "last": last}
    Path(target).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
