"""Whether this machine has the texts and tokenizers that a sweep names. Imports no torch."""

from mixassay import corpus
from mixassay.corpus import HELD_OUT
from mixassay.errors import UserError
from mixassay.source import Place
from mixassay.spec import task_cells
from mixassay.sweep import Sweep


def unreadable(sweep: Sweep) -> list[tuple[Place, str]]:
    """What is wrong with them, and where in the file each is named."""
    found: dict[tuple[Place, str], None] = {}
    for cell in sweep.cells():
        for sections, source in sweep.variants(cell):
            for args, _, _ in [*task_cells(sections.task, "train"), *task_cells(sections.task, "eval")]:
                if not corpus.named(args):
                    continue
                files, held_out = tuple(args["files"]), args.get("held_out", HELD_OUT)
                where = "files"
                try:
                    corpus.read(files, held_out)
                    where = "tokenizer"
                    corpus.tokenizer(args["tokenizer"], files, held_out)
                except UserError as fault:
                    found[source.nearest(f"task.{where}").at, f"{sections.task.name}: {where}: {fault}"] = None
    return list(found)
