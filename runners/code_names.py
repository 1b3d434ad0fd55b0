"""What a tree calls the code of some runs, asked by `refs.py`: a script, run with that tree's package on the path.

A run is named by a hash of the source that it depends on, and every version of the package hashes its own way. So the
question goes to the version that made the runs, and this file may use of the package only what all of them have.

Lines of JSON on standard input, {"sections": {...}, "plugins": [[file, ...], ...]}: a configuration as far as its code
goes, and the plug-in files that may be meant, in every combination. The answer to each is a line with all their hashes.
"""

import json
import sys
from pathlib import Path

from mixassay import provenance
from mixassay.spec import Sections


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        sections = Sections.model_validate_json(json.dumps(asked["sections"]))
        print(json.dumps([provenance.source_of(sections, map(Path, files)) for files in asked["plugins"]]))


if __name__ == "__main__":
    main()
