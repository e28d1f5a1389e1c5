"""The text that vLLM has for a request that runs, read where vLLM itself keeps it.

vLLM detokenizes every request at every step, to look for stop texts; which output a request
asked for only decides what it hands on. So the text of a request that asked for the final output
alone can be read at any time, and the request runs no differently for it.
"""

from typing import Any

from worker.engine.vllm.other_urls import response_id


class Detokenized:
    """Texts of requests in one engine.

    `found` holds on to choices that ended before others, `prompts` says how many a completion has,
    if several. `forget` a request that ended.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[int, Any]] = {}
        self.prompts: dict[str, int] = {}

    def forget(self, request_id: str) -> None:
        """Drop what is held of a request."""
        self.found.pop(request_id, None)
        self.prompts.pop(request_id, None)

    def texts(self, processor: Any, request_id: str) -> list[str]:
        """Return each choice's text so far.

        Args:
            processor: vLLM's OutputProcessor.
            request_id: ours, from which vLLM's serving classes make theirs.
        """
        found = self.found.get(request_id, {})
        for place, name in enumerate(self._names(processor.external_req_ids, request_id)):
            for internal in processor.external_req_ids.get(name, ()):
                state = processor.request_states.get(internal)
                if state is not None and state.detokenizer is not None:
                    several = state.parent_req.n if state.parent_req is not None else 1
                    found[place * several + state.request_index] = state.detokenizer
        if found:
            self.found[request_id] = found
        # Not finished: what may yet become a stop text is held back.
        return [
            found[n].get_next_output_text(False, False) if n in found else ""
            for n in range(max(found, default=-1) + 1)
        ]

    def _names(self, known: Any, request_id: str) -> list[str]:
        """Return vLLM's names: one of a chat or response, a completion's of its prompts."""
        chat, response = f"chatcmpl-{request_id}", f"{response_id(request_id)}_0"
        if chat in known:
            return [chat]
        if response in known:
            return [response]
        return [f"cmpl-{request_id}-{n}" for n in range(self.prompts.get(request_id, 1))]
