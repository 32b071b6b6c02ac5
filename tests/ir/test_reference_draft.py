"""Draft blocks against the released engine's metadata."""

import pytest
from safetensors.torch import load_file

from deepinfer_compile.ir.reference.draft import draft_block
from tests.golden_data import golden_root


def test_draft_blocks_lie_where_the_golden_metadata_says():
    golden = load_file(golden_root() / "ops" / "dspark_draft_metadata.safetensors")
    ring, block, window = golden["params_ring_block_window"].tolist()
    rows = golden["first_token_position"] + golden["last_valid_offset"]
    for request, row in enumerate(rows.tolist()):
        accepted = int(golden["positions"][row])
        slot = int(golden["slot_mapping_swa"][row]) // ring
        made = draft_block(accepted, slot, ring=ring, block=block, window=window)
        mine = slice(request * block, (request + 1) * block)
        assert list(made.positions) == golden["draft_positions"][mine].tolist()
        assert list(made.places) == golden["new_slot_mapping"][mine].tolist()
        keys = golden["kv_index"][mine]
        padded = [*made.keys, *[-1] * (keys.shape[1] - len(made.keys))]
        assert keys.tolist() == [padded] * block


def test_a_ring_too_short_for_window_and_block_is_refused():
    with pytest.raises(AssertionError, match="shorter than 128 \\+ 5"):
        draft_block(7, 1, ring=132, block=5, window=128)
