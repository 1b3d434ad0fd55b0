"""A hook of mkdocs, for what it reads otherwise than a repository's readers do.

- A link that leaves docs/ is right in the repository and would lead nowhere on the site. The file that it leads to, and
  what that links to, are put into the site under `repository/`: Markdown as pages, all else as it is. A link to a file
  that does not exist stays as it is, and a strict build fails.
- Words behind a block's language (```python ema.py, ```sh not-run: needs a GPU) are for the tests of the pages. Readers
  are told what the tests do not run.
- A list or a table may follow a paragraph's last line.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[#)])")
BLOCK = re.compile(r"(^```.*?^```$)", re.M | re.S)
NOT_RUN = re.compile(r"^(```\w+) not-run: (.*)$", re.M)
WORDS = re.compile(r"^(```\w+) .*$", re.M)
FOLLOWING = re.compile(r"^(?![-|]|\d+\.)(\S.*\n)(?=- |\| |1\. )", re.M)


def on_files(files: Files, config: MkDocsConfig) -> None:
    pages = [Path(str(file.abs_src_path)) for file in files.documentation_pages()]
    while pages:
        page = pages.pop()
        for link in LINK.findall(page.read_text()):
            target = Path(os.path.normpath(page.parent / link))
            uri = site_uri(target)
            if target.is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
                pages += [target] if target.suffix == ".md" else []


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(str(page.file.abs_src_path))

    def moved(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / link[0]))
        return os.path.relpath(site_uri(target), os.path.dirname(page.file.src_uri)) if target.is_file() else link[0]

    parts = BLOCK.split(markdown)  # prose and blocks in turns
    parts[::2] = [LINK.sub(moved, FOLLOWING.sub(r"\1\n", prose)) for prose in parts[::2]]
    told = [NOT_RUN.sub(r"*Not run by the tests: \2.*\n\n\1", block) for block in parts[1::2]]
    parts[1::2] = [WORDS.sub(r"\1", block) for block in told]
    return "".join(parts)


def site_uri(target: Path) -> str:
    """Where the site has a file of the repository."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"repository/{os.path.relpath(target, ROOT)}"
