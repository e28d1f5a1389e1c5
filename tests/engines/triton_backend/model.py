"""A stand-in for Triton's vLLM backend: its signature and manners, its model.json, but the answers
come from the shipped tiny model in transformers: greedy, float32, a token of each request in turn.

It is a Python-based backend as the real one is. The interpreter that tritonserver embeds knows no
environment: PYTHONPATH says where torch and transformers are.
"""

import os
import sys

sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)

import json
import queue
import threading
import time
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer

INPUTS = {
    "text_input": "TYPE_STRING", "stream": "TYPE_BOOL", "sampling_parameters": "TYPE_STRING",
    "exclude_input_in_output": "TYPE_BOOL", "return_finish_reason": "TYPE_BOOL",
    "return_num_input_tokens": "TYPE_BOOL", "return_num_output_tokens": "TYPE_BOOL",
}  # fmt: skip
OUTPUTS = {
    "text_output": "TYPE_STRING", "finish_reason": "TYPE_STRING",
    "num_input_tokens": "TYPE_UINT32", "num_output_tokens": "TYPE_UINT32",
}  # fmt: skip
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
KNOWN = {
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos",
    "min_tokens", "repetition_penalty",
}  # fmt: skip


class Running:
    """One request: its inputs, and what of its answer has been sent."""

    def __init__(self, request, model) -> None:
        self.request = request
        self.sender = request.get_response_sender()
        prompt = self.input("text_input").decode()
        self.stream = bool(self.input("stream"))
        self.params = json.loads(self.input("sampling_parameters") or "{}")
        exclude = self.input("exclude_input_in_output")
        self.prepend = prompt if not (self.stream if exclude is None else exclude) else ""
        if self.stream and self.prepend:
            raise ValueError("When streaming, `exclude_input_in_output` = False is not allowed.")
        if self.params.keys() - KNOWN:
            # What the backend answers when vLLM's SamplingParams refuse a name.
            raise AttributeError("'NoneType' object has no attribute 'lora_name'")
        self.ids = model.tokenizer(prompt)["input_ids"]
        if len(self.ids) > model.max_model_len:
            raise ValueError(
                f"The decoder prompt (length {len(self.ids)}) is longer than the maximum model "
                f"length of {model.max_model_len}."
            )
        self.new: list[int] = []
        self.text = ""
        self.sent = 0
        self.cache = None

    def input(self, name):
        """Return an input's one value, None where it was not sent."""
        tensor = pb_utils.get_input_tensor_by_name(self.request, name)
        return None if tensor is None else tensor.as_numpy()[0]

    def answer(self, finish_reason: str | None) -> None:
        """Send what is new: the delta of a stream, or everything at the end."""
        if not self.stream and finish_reason is None:
            return
        text, self.text = self.prepend + self.text, ""
        tensors = [_tensor("text_output", [text.encode()], np.object_)]
        if self.input("return_finish_reason"):
            tensors.append(_tensor("finish_reason", [str(finish_reason)], np.object_))
        if self.input("return_num_input_tokens"):
            tensors.append(_tensor("num_input_tokens", len(self.ids), np.uint32))
        if self.input("return_num_output_tokens"):
            tensors.append(_tensor("num_output_tokens", [len(self.new) - self.sent], np.uint32))
        self.sent = len(self.new)
        response = pb_utils.InferenceResponse(tensors)
        self.sender.send(response, flags=FINAL if finish_reason else 0)


def _tensor(name, values, dtype):
    return pb_utils.Tensor(name, np.asarray(values, dtype=dtype))


class TritonPythonModel:
    """What tritonserver calls."""

    @staticmethod
    def auto_complete_config(config):
        """Add what a config.pbtxt of three lines leaves out, as the vLLM backend does."""
        for name, kind in INPUTS.items():
            optional = name != "text_input"
            config.add_input({"name": name, "data_type": kind, "dims": [1], "optional": optional})
        for name, kind in OUTPUTS.items():
            config.add_output({"name": name, "data_type": kind, "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args) -> None:
        """Load the model that model.json names and start the one thread that computes."""
        arguments = json.loads(Path(pb_utils.get_model_dir(), "model.json").read_text())
        folder = Path(arguments["model"])
        self.max_num_seqs = arguments["max_num_seqs"]
        self.max_model_len = arguments["max_model_len"]
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self.ends = set(ends if isinstance(ends, list) else [ends])
        self.log_path = Path(os.environ["TINY_LOG"])
        self.hold_path = self.log_path.with_name("hold")
        self.die_path = self.log_path.with_name("die")
        self.name, self.dead, self.unloaded = args["model_name"], False, False
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._compute, daemon=True).start()

    def execute(self, requests) -> None:
        """Take requests in; each is answered through its own sender."""
        if self.dead and not self.unloaded:
            # As the vLLM backend does with ENABLE_VLLM_HEALTH_CHECK. But the backend does it again
            # for each request that it still has, and so may unload a model that was loaded since.
            self.unloaded = True
            pb_utils.unload_model(self.name)
        for request in requests:
            try:
                if self.dead:
                    raise RuntimeError("Model is unavailable due to unhealthy vLLM engine")
                self.waiting.put(Running(request, self))
            except Exception as error:
                _fail(request.get_response_sender(), error)

    def _compute(self) -> None:
        running: list[Running] = []
        while True:
            while len(running) < self.max_num_seqs and not (running and self.waiting.empty()):
                running.append(self.waiting.get())
                self._note("started")
            if self.die_path.exists():
                self.die_path.unlink()
                self.dead = True
            if self.dead:
                for one in running:
                    _fail(one.sender, RuntimeError("EngineCore encountered an issue."))
                running = []
            while self.hold_path.exists():  # an engine that hangs, in a server that is well
                time.sleep(0.01)
            running = [one for one in running if self._step(one)]

    def _note(self, what: str) -> None:
        """Tell the tests what became of a request."""
        with self.log_path.open("a") as log:
            log.write(f"{what}\n")

    def _step(self, one: Running) -> bool:
        """Compute one token; return whether the request goes on."""
        if one.sender.is_cancelled():
            self._note("cancelled")
            one.sender.send(flags=FINAL)
            return False
        try:
            one.answer(reason := self._next_token(one))
        except Exception as error:
            _fail(one.sender, error)
            return False
        return reason is None

    @torch.inference_mode()
    def _next_token(self, one: Running) -> str | None:
        ids = one.new[-1:] or one.ids
        out = self.model(torch.tensor([ids]), past_key_values=one.cache, use_cache=True)
        one.cache = out.past_key_values
        token = int(out.logits[0, -1].argmax())
        before = self.tokenizer.decode(one.new, skip_special_tokens=True)
        one.new.append(token)
        after = self.tokenizer.decode(one.new, skip_special_tokens=True)
        one.text += after[len(before) :]
        if token in self.ends and not one.params.get("ignore_eos"):
            return "stop"
        return "length" if len(one.new) >= one.params.get("max_tokens", 16) else None


def _fail(sender, error: Exception) -> None:
    problem = pb_utils.TritonError(f"Error generating stream: {error}")
    nothing = [_tensor("text_output", [b"N/A"], np.object_)]
    sender.send(pb_utils.InferenceResponse(nothing, error=problem), flags=FINAL)
