"""Survey of a tokenizer on data, ready for JSON; shown as text or as a page."""

from pathlib import Path
from typing import Any

from torchtitan.config.sections.data import Source
from torchtitan.data.spec import DataSpec
from torchtitan.tools.corpus.columns import DocumentColumns, Estimate
from torchtitan.tools.corpus.mixture import mixture
from torchtitan.tools.corpus.reading import read
from torchtitan.tools.corpus.tally import Reading, ReadOptions
from torchtitan.tools.corpus.vocabulary import Vocabulary
from torchtitan.tools.web import web_page
from torchtitan.utils.wording import listed


def survey(spec: DataSpec, options: ReadOptions, steps: int | None = None) -> dict[str, Any]:
    """Read all sources and return what the survey shows.

    Args:
        steps: steps of the run that reads these sources; None without a run.

    Raises:
        UserError: a source can't be read.
    """
    vocabulary = Vocabulary(spec.tokenizer)
    sources = []
    for source in spec.sources:
        reading = read(spec, source, options)
        sources.append(_source_data(source, reading, spec, vocabulary))
    tokens = {
        source["name"]: None if source["of_stream"] else source["tokens"]["value"]
        for source in sources
    }
    return {
        "tokenizer": {
            "name": spec.tokenizer.name,
            "vocab_size": spec.tokenizer.vocab_size,
            "entries": vocabulary.entries,
        },
        "seq_len": spec.longest_row,
        "sample": options.sample,
        "seed": options.seed,
        "sources": sources,
        "steps": steps,
        "mixture": None if steps is None else mixture(spec, steps, tokens),
    }


def _source_data(
    source: Source, reading: Reading, spec: DataSpec, vocabulary: Vocabulary
) -> dict[str, Any]:
    tally = reading.tally
    columns = tally.columns()
    documents, tokens, size = tally.sums(columns)
    if reading.tokens is not None:
        tokens = Estimate(float(reading.tokens), 0.0)
    report = reading.report or {}
    bad = {kind: round(number) for kind, number in tally.bad.items()} or report.get("skipped", {})
    return {
        "name": source.name,
        "path": source.dataset_path or source.dataset,
        "kind": reading.kind,
        "of_stream": reading.is_stream,
        "file_bytes": reading.size,
        "drawn": tally.is_drawn,
        "read": dict(zip(("documents", "tokens", "bytes"), map(int, tally.totals), strict=True)),
        "documents": documents._asdict(),
        "tokens": tokens._asdict(),
        "bytes": size._asdict(),
        "bytes_per_token": _per_token(columns, tokens, size, tally.is_drawn),
        "of_documents": columns.percentiles(columns.bytes / columns.tokens.clip(min=1)),
        "lengths": columns.percentiles(columns.tokens),
        "histogram": columns.histogram(),
        "longer": columns.longer_than(spec.longest_row),
        "bad": bad,
        "first_bad": tally.first_bad,
        "ignored": reading.ignored,
        "duplicates": report.get("duplicates", tally.duplicates()),
        "vocabulary": vocabulary.use(tally.read, tally.counts),
    }


def _per_token(
    columns: DocumentColumns, tokens: Estimate, size: Estimate, drawn: bool
) -> dict[str, float] | None:
    if drawn:
        bytes_per_token = columns.ratio(columns.bytes, columns.tokens)
    else:
        bytes_per_token = Estimate(size.value / tokens.value, 0.0) if tokens.value else None
    return bytes_per_token and bytes_per_token._asdict()


def survey_page(content: dict[str, Any]) -> str:
    """A self-contained page that shows a survey."""
    tools = Path(__file__).parents[1]
    scripts = [tools / "reports" / "formats.js", tools / "corpus" / "page.js"]
    title = listed([source["name"] for source in content["sources"]], 4)
    return web_page(title, content, scripts)
