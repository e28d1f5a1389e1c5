"""`submit --order prefix` beside the file's own order and `LLM.generate`, on one GPU.

    ordering.py --shape 8b --out FILE [--rounds 4] [--documents 240] [--questions 4]
                [--kv-gib 24] [--seconds 500] [--few-rounds 2]

Documents × questions whose documents do not fit the prefix cache together. Each round runs every
form once, the order rotates; each run has documents of its own, of the same lengths, so that
nothing of an earlier run is in a cache. Both engines are warm and share the GPU; only one works
at a time. Requests/s count from the start of `producer submit` to the last result. Computed tokens
(prompt tokens less the engine's own count of cache hits) are over the least possible.

by_question_input, by_question_prefix   all first questions, then all second ones; as is, or ordered
shuffled_input, shuffled_prefix         the same lines in random order; as is, or ordered
offline                                 `LLM.generate` on the shuffled lines
few_input, few_prefix                   as many shuffled lines of 8 documents, which all fit the
                                        cache: nothing is to be gained, and nothing may be lost
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from bench.common import report
from bench.gpu import pairs, workload
from bench.gpu.record import Record, options

from contract.redis import keys
from demo.stack import eventually

FEW = 8
FEW_FORMS = ("few_input", "few_prefix")
FORMS = ("by_question_input", "by_question_prefix", "shuffled_input", "shuffled_prefix", "offline")
#: Tokens (letters, see workload.py) of a document and of a question, and of an answer.
DOCUMENT, QUESTION, ANSWER = (1500, 2500), 40, (16, 64)
EXPECTED = {
    "written": "before the first run, from facts measured with vLLM 0.26 in one process: 51 s by "
    "question, 38 s shuffled, 16.6 s ordered",
    "by_question": 3.0,
    "shuffled": 2.2,
    "to_offline": 2.1,
    "few": 1.0,
    "computed": 1.01,
}
#: `computed` at most; the others at least.
BARS = {"by_question": 2.5, "shuffled": 1.8, "to_offline": 1.7, "few": 0.97, "computed": 1.02}
RUN_S = 180.0


def lines(seed: int, documents: int, questions: int, *, shuffled: bool) -> list[tuple[str, int]]:
    """Return prompts with their numbers of output tokens; lengths are the same for any seed."""
    lengths, letters = random.Random(1), random.Random(seed)
    texts = [
        "".join(letters.choices(workload.LETTERS, k=lengths.randint(*DOCUMENT)))
        for _ in range(documents)
    ]
    found = [
        (text + "".join(letters.choices(workload.LETTERS, k=QUESTION)), lengths.randint(*ANSWER))
        for _ in range(questions)
        for text in texts
    ]
    if shuffled:
        random.Random(2).shuffle(found)
    return found


class Ordering:
    """Runs one form after the other."""

    def __init__(self, bench: pairs.Bench, chosen: argparse.Namespace, folder: Path) -> None:
        self.bench, self.chosen, self.folder, self.runs = bench, chosen, folder, 0

    def time(self, form: str) -> dict[str, Any]:
        """Run all requests one way, with documents of this run."""
        self.runs += 1
        documents, questions = self.chosen.documents, self.chosen.questions
        if form in FEW_FORMS:
            documents, questions = FEW, documents * questions // FEW
        wanted = lines(self.runs, documents, questions, shuffled=not form.startswith("by_question"))
        if form == "offline":
            path = self.folder / "prompts.json"
            path.write_text(json.dumps(wanted))
            found = self.bench.peers["offline"].ask(file=str(path))
        else:
            found = self._queue(wanted, form.rpartition("_")[2])
        least = sum({prompt[:-QUESTION]: len(prompt) - QUESTION for prompt, _ in wanted}.values())
        computed = found["prompt_tokens"] - found["cached_tokens"]
        figures = {
            "requests_per_s": len(wanted) / found["seconds"],
            "computed_to_least": computed / (least + QUESTION * len(wanted)),
        }
        found = {"form": form} | figures | found
        print(json.dumps(found), flush=True)
        return found

    def _queue(self, wanted: Sequence[tuple[str, int]], order: str) -> dict[str, Any]:
        path = self.folder / "in.jsonl"
        with path.open("w") as file:
            file.writelines(json.dumps(workload.body(one)) + "\n" for one in wanted)
        worker, client = self.bench.peers["worker"], self.bench.server.client()
        worker.ask(do="watch", count=len(wanted))
        seconds, micros = client.time()
        command = [sys.executable, "-m", "producer", "submit", str(path), "--batch-id", "b",
                   "--order", order]  # fmt: skip
        env = os.environ | {"WARMQ_REDIS_URL": self.bench.server.url}
        subprocess.run(command, cwd=pairs.ROOT, env=env, check=True)
        key = keys.batch_key("b")
        ended = eventually(lambda: client.hget(key, "finished_at"), RUN_S, "the end", 0.02)
        state = client.hgetall(key)
        client.flushdb()
        client.close()
        assert int(state[b"completed"]) == len(wanted), state
        assert int(state[b"completion_tokens"]) == sum(tokens for _, tokens in wanted), state
        return {
            "seconds": int(ended) / 1000 - int(seconds) - int(micros) / 1e6,
            "prompt_tokens": int(state[b"prompt_tokens"]),
        } | worker.ask(do="watched")


def reached(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return rates, computed tokens and ratios of the same round."""
    found = {}
    for form in FORMS + FEW_FORMS:
        mine = [turn[form] for turn in rounds if form in turn]
        if mine:
            found[form] = report.spread([run["requests_per_s"] for run in mine], 2)
            least = [run["computed_to_least"] for run in mine if "computed_to_least" in run]
            if least:
                found[f"{form}_computed_to_least"] = report.spread(least, 4)
    for name, over, base in (
        ("by_question", "by_question_prefix", "by_question_input"),
        ("shuffled", "shuffled_prefix", "shuffled_input"),
        ("to_offline", "shuffled_prefix", "offline"),
        ("few", "few_prefix", "few_input"),
    ):
        ratios = [
            turn[over]["requests_per_s"] / turn[base]["requests_per_s"]
            for turn in rounds
            if over in turn
        ]
        if ratios:
            found[name] = report.spread(ratios, 3)
    return found


def main() -> None:
    """Measure; write what there is after every round."""
    parser = options(__doc__ or "")
    parser.add_argument("--few-rounds", type=int, default=2, help="rounds with few documents, too")
    parser.add_argument("--documents", type=int, default=240)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--kv-gib", type=float, default=24, help="KV cache of each engine")
    chosen = parser.parse_args()
    chosen.model, chosen.max_num_seqs, chosen.requests = None, 256, 1
    chosen.output_tokens, chosen.prompt_tokens, chosen.pooling = ANSWER, (64, 512), None
    chosen.engine = json.dumps({"enable_prefix_caching": True, "max_model_len": 4096})
    begin = time.monotonic()
    rounds: list[dict[str, dict[str, Any]]] = []
    with pairs.started(chosen, ("offline", "queue")) as bench:
        ordering = Ordering(bench, chosen, chosen.out.parent)
        record = Record(
            chosen, begin, engine=pairs.engine_of(chosen), documents=chosen.documents,
            questions=chosen.questions, expected=EXPECTED, bars=BARS,
        )  # fmt: skip
        for form in ("shuffled_prefix", "offline"):
            ordering.time(form)  # warms both engines up, and is not counted
        for number in range(chosen.rounds):
            if rounds and time.monotonic() - begin > chosen.seconds:
                break
            forms = FORMS + (FEW_FORMS if number < chosen.few_rounds else ())
            rounds.append({form: ordering.time(form) for form in report.in_turn(forms, number)})
            record.keep(reached=reached(rounds))
    print(json.dumps({name: found["median"] for name, found in record.data["reached"].items()}))


if __name__ == "__main__":
    main()
