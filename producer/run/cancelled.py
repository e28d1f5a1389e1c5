"""Makes the results of a cancelled run's lines that were not submitted."""

from collections.abc import Iterator

from contract import naming
from contract.batch import BY_USER
from contract.errors import RequestFailed, RequestRejected
from contract.openai.lines import parse_line
from contract.results import ResultLine, failure_meta, result_line
from producer.input.reader import RawChunk
from producer.input.seen import SeenIds
from producer.input.tables.kept import split_kept


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of a line of the input; None if it has none."""
    try:
        return parse_line(split_kept(line)[0], {}).custom_id
    except RequestRejected as error:
        return error.custom_id


def cancelled_lines(run: str, batch_id: str, raw: RawChunk, seen: SeenIds) -> Iterator[ResultLine]:
    """Yield a cancelled result for each line, as a line of the window `batch_id`.

    `seen` has the custom_ids of all earlier lines of the run.
    """
    error = RequestFailed(BY_USER, code="cancelled")
    for number, text in raw.lines:
        custom_id = custom_id_of(text)
        if custom_id is not None and seen.add(naming.request_id(run, custom_id)):
            request_id = naming.request_id(batch_id, custom_id)
        else:
            request_id = naming.line_request_id(batch_id, number)
        name = f"line-{number}" if custom_id is None else custom_id
        meta = failure_meta(
            request_id, error, batch=batch_id, custom_id=name, line=number, revoked=True
        )
        line = result_line(request_id, name, number, meta)
        if kept := split_kept(text)[1]:
            line.json = line.json[:-1] + b',"kept":' + kept + b"}"
        yield line
