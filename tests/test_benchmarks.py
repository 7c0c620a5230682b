"""The numbers of bytes that pages quote are those of the published configurations."""

from pathlib import Path

import torch

from benchmarks import weight_sizes

DOCS = Path(__file__).parent.parent / "docs"


def test_sizes_of_weights_on_the_pages_are_those_of_the_configurations():
    rows = (DOCS / "rewards" / "built_in.md").read_text(encoding="utf-8").splitlines()
    with torch.device("meta"):
        for names, network in weight_sizes.list_rewards():
            size = weight_sizes.format_bytes(4 * weight_sizes.count_weights(network))
            for name in names.partition(" (")[0].split(", "):
                assert any(row.startswith(f"| `{name}` |") and size in row.split("|")[-2] for row in rows), (
                    name,
                    size,
                )
    page = (DOCS / "memory.md").read_text(encoding="utf-8")
    encoders = weight_sizes.count_weights(*weight_sizes.list_encoders("Wan2.1-1.3B"))
    assert f"{weight_sizes.format_bytes(2 * encoders)} for Wan" in page.replace("\n", " ")
    for optim, name in (("adamw_torch_8bit", "AdamW8bit"), ("adamw_torch_4bit", "AdamW4bit")):
        assert f"| `{optim}` | torchao | {weight_sizes.count_states(name):.2f} |" in page
