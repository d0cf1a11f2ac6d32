"""`thinwire export-peft`: write the LoRA adapter of a run for peft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.options import DataDir, RunDirectory
from thinwire.core.text import visible


def export_peft(
    run: RunDirectory,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the adapter.")],
    data_dir: DataDir = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the whole model instead, with the adapter merged into it.")
    ] = False,
) -> None:
    """Export the LoRA adapter of a run, to be loaded with `peft.PeftModel.from_pretrained`.

    With --merged, a model that transformers loads without peft.

    Example: thinwire export-peft runs/lora-text-classification-s0-1a2b3c my-adapter
    """
    from thinwire.experiments.peft_export import adapter_of_run, merged_of_run

    write = merged_of_run if merged else adapter_of_run
    for file in write(run, folder, data_dir):
        print(visible(str(file)))
