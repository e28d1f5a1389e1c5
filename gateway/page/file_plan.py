"""Plans an uploaded file by the gateway's own rules, and renders some of its prompts."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

import orjson

from contract.errors import RequestRejected, WarmqError
from contract.openai.body import BODY_TYPES, CHAT_URL
from contract.openai.lines import parse_line
from contract.redis.waiting import WaitingReads
from gateway.batches.api.batches import DEFAULT_PRIORITY
from gateway.batches.api.record import BatchError
from gateway.batches.runner.input_file import model_of, validate_input
from gateway.batches.runner.row_errors import explained
from gateway.file_store import lines_of
from gateway.files.files import FileRecord
from gateway.http.caller import Caller
from gateway.http.services import Services
from gateway.page.conversion.running import Conversion, convert
from gateway.page.file_reading import ReadGuard, TooLong
from gateway.page.requests import prompt_in
from gateway.served_models import ServedModels
from producer.input.options import BadOption, field_value
from producer.input.reader import Input
from producer.input.structured import with_structure
from producer.input.tables.source import kind_of
from producer.run.trial import Spread
from producer.submit.plan import Plan, plan
from producer.submit.prompt_tokens import choose_counter
from producer.submit.submission import Submission
from producer.time_left import OutlookReads

#: Most uncompressed bytes of a file that is planned while the browser waits, and most seconds.
PLANNED_BYTES, PLANNED_S = 32 * 2**20, 10.0
#: Most bytes and lines at the start of a file that are searched for endpoints and models. The lines
#: are bounded because each malformed one costs an exception.
HEAD_BYTES, HEAD_LINES = 256 * 1024, 2000
#: Prompts that are shown, and most characters of each.
PREVIEWS, PREVIEW_CHARACTERS = 5, 1000
#: Pattern of the beginning of a second field in the value of a first.
_SECOND_FIELD = re.compile(r"[\s,;]\w+\s*=")


@dataclass(frozen=True, slots=True)
class Choices:
    """A user's choices for a file, like --map, --set and --model of `producer submit`.

    `system` and `user` are templates over a table's columns, `id` is the column of the custom_id,
    `fields` has a `name=value` on each line, for all requests; `answers` are the allowed
    answers, separated by commas, as for --choice.
    """

    id: str = ""
    system: str = ""
    user: str = ""
    answers: str = ""
    model: str = ""
    fields: str = ""

    @classmethod
    def of(cls, sent: Mapping[str, str]) -> Self:
        """Return the choices in a query or form."""
        names = cls.__dataclass_fields__
        return cls(**{name: sent.get(name, "").replace("\r\n", "\n")[:20_000] for name in names})

    def as_query(self) -> dict[str, str]:
        """Return the choices that were made, as `of` reads them."""
        return {name: value for name, value in asdict(self).items() if value}

    @property
    def pairs(self) -> dict[str, str]:
        """The column or template of each field; empty if the columns have the fields' names."""
        named = {"custom_id": self.id, "messages.system": self.system, "messages.user": self.user}
        return {name: value for name, value in named.items() if value} if self.user else {}

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields for all requests; a value is JSON if it is valid, otherwise text.

        Raises BadOption for a bad field or bad allowed answers.
        """
        fields: dict[str, Any] = {"model": self.model} if self.model else {}
        for line in filter(str.strip, self.fields.split("\n")):
            name, equals, text = line.partition("=")
            if not equals:
                raise BadOption(f"{line.strip()}: write name=value, for example max_tokens=64")
            try:
                fields[name.strip()] = field_value(name.strip(), text.strip())
            except BadOption:
                if not _SECOND_FIELD.search(text):
                    raise
                raise BadOption(f"{line.strip()}: write each field on a line of its own") from None
        return with_structure(fields, self.answers.strip() or None, None)

    @property
    def problem(self) -> str:
        """Why the fields or the allowed answers are bad, '' if they are good."""
        try:
            _ = self.overrides
        except BadOption as error:
            return error.message
        return ""


@dataclass(slots=True)
class FilePlan:
    """The plan of one file.

    `problem` is why there is no plan, `refused` why the gateway would refuse the file. `convert` is
    True if the file is not in OpenAI's form. `columns` are those of a table. `prompts` are
    custom_ids and texts of requests that are spread over the file. `unserved` are models that no
    worker serves, `waiting` is the number of requests in the queue before it. `served` is a text
    about the models that the caller may use. `idle` is True if no worker runs. `size` counts the
    bytes read.
    """

    plan: Plan | None = None
    problem: str = ""
    refused: list[str] = field(default_factory=list)
    convert: bool = False
    columns: list[str] = field(default_factory=list)
    prompts: list[tuple[str, str]] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    unserved: list[str] = field(default_factory=list)
    served: str = ""
    idle: bool = False
    waiting: int = 0
    url: str = ""
    size: int = 0


def named_in(lines: Iterable[bytes]) -> tuple[Counter[str], Counter[str]]:
    """Count the endpoints and models that the first lines of a file name."""
    urls, models = Counter[str](), Counter[str]()
    for line in islice(lines, HEAD_LINES):
        try:
            url = orjson.loads(line)["url"]
        except (orjson.JSONDecodeError, TypeError, LookupError):
            continue
        if isinstance(url, str) and url in BODY_TYPES:
            urls[url] += 1
        if model := model_of(line):
            models[model] += 1
    return urls, models


def must_convert(record: FileRecord, choices: Choices) -> bool:
    """Return whether a file must be converted whatever its lines are."""
    return bool(kind_of(record.filename) or choices.model or choices.fields or choices.answers)


def plan_file(
    services: Services, caller: Caller, record: FileRecord, choices: Choices, guard: ReadGuard
) -> FilePlan:
    """Plan a file for the queue of the model that most of its lines name."""
    head = b"".join(services.store.read(record.id, 0, min(record.bytes, HEAD_BYTES)))
    urls, models = named_in(lines_of([head]))
    convert_it = must_convert(record, choices)
    file_plan = FilePlan(problem=choices.problem, convert=convert_it, size=record.bytes)
    _set_url_and_models(file_plan, urls, models)
    ready = bool(urls) and not file_plan.convert
    if not urls and head.lstrip()[:1] == b"{":
        file_plan.convert = True  # the short form
    if record.bytes > PLANNED_BYTES:
        return file_plan
    guard.start(PLANNED_S)
    try:
        with batch_lines(services, record, choices, ready, guard) as (path, conversion):
            if conversion is not None:
                file_plan.columns, file_plan.problem = conversion.columns, conversion.error
                file_plan.convert, file_plan.refused = conversion.changed, conversion.problems
                with path.open("rb") as file:
                    _set_url_and_models(file_plan, *named_in(file))
            if not file_plan.problem:
                _add_plan(services, caller, file_plan, path, guard)
    except TooLong:
        file_plan.plan = None
    except WarmqError as error:
        file_plan.problem = error.message
    return file_plan


@contextmanager
def batch_lines(
    services: Services, record: FileRecord, choices: Choices, ready: bool, guard: ReadGuard
) -> Iterator[tuple[Path, Conversion | None]]:
    """Provide a file's lines in OpenAI's form; it is converted unless it is `ready`.

    Raises TooLong for more than PLANNED_BYTES.
    """
    with services.store.local(record.id) as path:
        if ready:
            yield path, None
            return
        with tempfile.NamedTemporaryFile(prefix="warmq-page-") as lines:
            conversion = _convert(services, record, choices, path, lines, guard)
            lines.flush()
            yield Path(lines.name), conversion


def _set_url_and_models(file_plan: FilePlan, urls: Counter[str], models: Counter[str]) -> None:
    file_plan.url = urls.most_common(1)[0][0] if urls else CHAT_URL
    file_plan.models = [name for name, _ in models.most_common(10)]


def _convert(
    services: Services, record: FileRecord, choices: Choices, path: Path, lines: Any,
    guard: ReadGuard,
) -> Conversion:  # fmt: skip
    left = PLANNED_BYTES

    def write(line: bytes) -> None:
        nonlocal left
        left -= len(line)
        if left < 0:
            raise TooLong
        lines.write(line)

    longest, problem = services.settings.max_line_bytes, choices.problem
    overrides = {} if problem else choices.overrides  # the page shows it next to the columns
    conversion = convert(path, record.filename, choices.pairs, overrides, longest, write, guard)
    conversion.error = conversion.error or problem
    return conversion


def _add_plan(
    services: Services, caller: Caller, file_plan: FilePlan, path: Path, guard: ReadGuard
) -> None:
    """Add the plan, the problems for which the file would be refused, and some prompts."""
    settings = services.settings

    def watch() -> None:
        guard()
        file_plan.size = max(file_plan.size, source.decompressed)
        if source.decompressed > PLANNED_BYTES:
            raise TooLong

    served = ServedModels.of(
        services.batches.announcements(), settings.queue, settings.gateway_models
    )
    model = file_plan.models[0] if file_plan.models else ""
    queue = served.queue_of(model, caller.models) or settings.queue
    workers = [w for w in services.batches.workers(queue) if w.get("state") != "draining"]
    outlook = OutlookReads.using(services.batches).outlook_of([queue], workers)
    spread = Spread(PREVIEWS)
    with closing(Input(str(path), watch=watch)) as source:
        submission = Submission("plan", queue, DEFAULT_PRIORITY, tenant=caller.tenant)
        counter = choose_counter(None, workers)
        new_plan = plan(
            settings, submission, source, counter, workers, outlook,
            watch=lambda chunks: explained(spread.watch(chunks)),
        )  # fmt: skip
    longest, most = settings.max_line_bytes, settings.gateway_max_requests
    summary = validate_input(path, file_plan.url, longest, most, guard)
    what = "row" if file_plan.columns else "line"
    if not file_plan.refused:
        file_plan.refused = [_problem_text(problem, what) for problem in summary.problems[:10]]
    asked = sorted(summary.bytes_of)
    file_plan.unserved = [m for m in asked if m and served.queue_of(m, caller.models) is None]
    file_plan.served, file_plan.idle = served.listing(caller.models), not served.alive
    totals = WaitingReads.using(services.batches).waiting_totals([queue])
    file_plan.waiting = sum(totals.values())
    file_plan.prompts = list(_prompts(line for _, line, _ in spread.chosen))
    file_plan.plan = new_plan


def _problem_text(problem: BatchError, what: str) -> str:
    return f"{what} {problem.line}: {problem.message}" if problem.line else problem.message


def _prompts(lines: Iterable[bytes]) -> Iterable[tuple[str, str]]:
    for line in lines:
        try:
            request = parse_line(line)
        except RequestRejected:
            continue
        text = prompt_in(orjson.loads(request.body))
        yield request.custom_id or "", text[:PREVIEW_CHARACTERS]
