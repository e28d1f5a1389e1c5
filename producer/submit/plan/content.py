"""What a file asks for, as `plan` adds it up."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Asked:
    """Tokens that a file asks for: `written` to be written, each after reading its context,
    `read` tokens in all."""

    written: float = 0.0
    read: float = 0.0

    def add(self, prompt: int, answer: float, choices: int) -> None:
        """Take a request whose answers have so many tokens each."""
        self.written += choices * answer
        self.read += choices * answer * (prompt + answer / 2)


@dataclass(slots=True)
class Shared:
    """Beginnings that prompts share, in tokens as `order.plan` estimates them.

    `whole` is that of all prompts; `repeated` are those that an earlier prompt has begun with,
    `as_is` those of them that stay in the cache in the file's own order, `distinct` the shared
    beginnings, each once.
    """

    whole: int = 0
    repeated: int = 0
    as_is: int = 0
    distinct: int = 0

    @property
    def share(self) -> float:
        """The share of the prompts that need not be computed if the cache keeps it all."""
        return self.repeated / self.whole if self.whole else 0.0


@dataclass(slots=True)
class FileContent:
    """What was found. `estimated` requests have an estimated number of prompt tokens.

    `limits` is the sum of what their answers may have at most, in tokens; `without_limit` requests
    name none. `fixed` ones will be that long. `choices` are all answers (`n` of a request);
    `expected` is what they take if they are as long as the queue's answers on average, `most` if
    each ends at its limit.
    """

    lines: int = 0
    requests: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    duplicates: int = 0
    prompt_tokens: int = 0
    estimated: int = 0
    limits: int = 0
    without_limit: int = 0
    fixed: int = 0
    most: Asked = field(default_factory=Asked)
    expected: Asked = field(default_factory=Asked)
    choices: int = 0
    message_bytes: int = 0
    index_bytes: int = 0
    reject_bytes: int = 0
    shared: Shared = field(default_factory=Shared)
