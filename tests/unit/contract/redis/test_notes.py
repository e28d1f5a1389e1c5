"""What a note on a request that may run again says."""

from contract.redis.notes import Note, read_note


def test_a_note_tells_how_the_request_ended_and_how_large_its_message_is() -> None:
    assert read_note(b"warmq:batches\0failed\x00123\0warmq") == Note("failed", 123)


def test_a_note_of_protocol_1_holds_the_message_and_no_outcome() -> None:
    assert read_note(b'warmq\0{"a":1}') == Note("", 7, b'{"a":1}')
