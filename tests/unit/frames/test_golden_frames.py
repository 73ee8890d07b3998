"""The frame format against its golden frames: the guest agent is tested against the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuos.types.frames import HEADER_BYTES, MAX_PAYLOAD, Frame, FrameDecoder, FrameError, FrameKind, encode_frame

GOLDEN = json.loads((Path(__file__).parents[3] / "api" / "frames.json").read_text())


def _golden_frame(case: dict[str, object]) -> Frame:
    return Frame(FrameKind[str(case["kind"])], int(str(case["offset"])), bytes.fromhex(str(case["payload"])))


@pytest.mark.parametrize("case", GOLDEN["frames"], ids=lambda case: case["name"])
def test_golden_frame_is_encoded_and_decoded(case: dict[str, object]) -> None:
    frame = _golden_frame(case)
    raw = bytes.fromhex(str(case["frame"]))
    assert encode_frame(frame.kind, frame.payload, offset=frame.offset) == raw
    assert list(FrameDecoder().feed(raw)) == [frame]


@pytest.mark.parametrize("case", GOLDEN["refused"], ids=lambda case: case["name"])
def test_bytes_out_of_contract_are_refused_at_the_header(case: dict[str, str]) -> None:
    with pytest.raises(FrameError, match="cannot read frame"):
        FrameDecoder().feed(bytes.fromhex(case["bytes"]))


def test_every_kind_has_a_golden_frame() -> None:
    assert {case["kind"] for case in GOLDEN["frames"]} == {kind.name for kind in FrameKind}


@given(st.integers(1, 64))
def test_frames_in_pieces_of_any_size_come_out_whole(piece: int) -> None:
    raw = b"".join(bytes.fromhex(case["frame"]) for case in GOLDEN["frames"])
    decoder = FrameDecoder()
    found = [frame for at in range(0, len(raw), piece) for frame in decoder.feed(raw[at : at + piece])]
    assert found == [_golden_frame(case) for case in GOLDEN["frames"]]
    assert decoder.pending == 0


def test_a_cut_stream_is_seen_as_pending_bytes() -> None:
    raw = encode_frame(FrameKind.STDOUT, b"abc")
    decoder = FrameDecoder()
    assert list(decoder.feed(raw[:-1])) == []
    assert decoder.pending == len(raw) - 1


def test_the_largest_payload_passes() -> None:
    raw = encode_frame(FrameKind.STDOUT, bytes(MAX_PAYLOAD))
    (frame,) = FrameDecoder().feed(raw)
    assert len(frame.payload) == MAX_PAYLOAD
    assert len(raw) == HEADER_BYTES + MAX_PAYLOAD
