"""Checks of the texts: the right bytes, long enough, apart from each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantkit.core.errors import InputError, QuantkitError
from quantkit.core.stats import group_by
from quantkit.core.units import MIB, format_bytes
from quantkit.job.calibration import Overlap, may_calibrate, read_overlaps
from quantkit.job.doctor_case import Case, Finding, Unknown, not_applicable, ok, problem, warning
from quantkit.job.evaluation import Evaluation
from quantkit.job.measuring import require_folder
from quantkit.job.rundir import RunFolder, read_json
from quantkit.measure.summary import MIN_ARTICLES
from quantkit.spec.protocol import Corpus

_OVERLAP_BYTES = 4 * MIB  # of all texts; what takes longer than a moment is left to the run
_FETCHED = "connect to the network for the start of the run, or set QUANTKIT_CORPUS_DIR to a folder that holds it"


def look_at_texts(case: Case) -> Iterator[Finding]:
    """Each evaluation text: its bytes, and its chunks as the base's vocabulary sees them."""
    require_folder(case.protocol, case.options.corpus)
    for name in case.protocol.eval.corpora:
        yield from _look_at_text(case, f"evaluation text {name}", name)


def _look_at_text(case: Case, check: str, name: str) -> Iterator[Finding]:
    corpus = case.protocol.corpus(name)
    try:
        path = case.text(name, case.options.corpus)
        if path is None:
            yield _fetched(check, corpus)
            return
        evaluation = case.evaluation(name)
    except QuantkitError as error:
        yield problem(check, error)
        return
    except Unknown as missing:
        yield not_applicable(check, f"not looked at without {missing}")
        return
    assert evaluation is not None  # the text is there
    n_articles = _effective_articles(evaluation)
    n, n_total = len(evaluation.chunks), evaluation.n_chunk_total
    found = (f"{_bytes_words(corpus, path)}; {len(evaluation.tokens)} tokens, {n} of {n_total} chunks, {n_articles:.1f} articles' "
             "worth")
    if n_articles < MIN_ARTICLES:
        yield warning(check, f"{found}: below {MIN_ARTICLES} no error can be told", "take more chunks, or spread ones")
    else:
        yield ok(check, found)


def look_at_calibration(case: Case) -> Iterator[Finding]:
    """The calibration text: its bytes, and whether it can be long enough."""
    protocol, check = case.protocol, "calibration text"
    if case.options.imatrix is not None:
        yield not_applicable(check, "an importance matrix is given")
        return
    if not may_calibrate(protocol, case.tiers):
        yield not_applicable(check, "no tier uses importances")
        return
    spec = protocol.imatrix
    corpus = protocol.corpus(spec.corpus)
    path = case.text(spec.corpus, case.options.calibration)
    needed = max(2, spec.n_chunk) * spec.n_ctx
    if corpus.size_bytes < needed:  # a token has at least a byte
        raise InputError(f"expected {max(2, spec.n_chunk)} chunks of {spec.n_ctx} tokens in the calibration text {corpus.name}, "
                         f"found {corpus.size_bytes} bytes: use a longer text or fewer chunks")
    if path is None:
        yield _fetched(check, corpus)
        return
    seen = expected_tokens(case, corpus)
    if seen is not None and seen < needed:
        yield warning(check, f"{_bytes_words(corpus, path)}; about {seen} tokens if it is like the evaluation text, and "
                      f"{needed} are asked for", "use a longer text, or fewer chunks with --set imatrix.n_chunk")
    else:
        yield ok(check, _bytes_words(corpus, path))


def look_at_overlap(case: Case) -> Iterator[Finding]:
    """Whether passages of the evaluation texts stand in the calibration text."""
    protocol, check = case.protocol, "overlap of texts"
    if case.options.imatrix is not None or not may_calibrate(protocol, case.tiers):
        yield not_applicable(check, "nothing is calibrated")
        return
    held = read_json(RunFolder(path=case.run).record("imatrix", "overlap")) if case.run is not None else None
    names = (protocol.imatrix.corpus, *protocol.eval.corpora)
    size_bytes = sum(protocol.corpus(name).size_bytes for name in names)
    paths = [case.text(names[0], case.options.calibration), *(case.text(name, case.options.corpus) for name in names[1:])]
    if held is None and (size_bytes > _OVERLAP_BYTES or None in paths):
        why = "not all of them are here" if None in paths else f"{format_bytes(size_bytes)} take a while"
        yield ok(check, f"other texts by their hashes; the run counts shared {protocol.imatrix.ngram}-grams when it starts ({why})")
        return
    overlaps: tuple[Overlap, ...] = read_overlaps(protocol, case.options.corpus, case.options.calibration, held)
    allowed = f"{protocol.imatrix.max_shared_ngrams:.2%} are allowed"
    yield ok(check, "; ".join(f"{o.share:.2%} of {o.ngram}-grams shared with {o.evaluation}, {allowed}" for o in overlaps))


def look_at_mtp_text(case: Case) -> Iterator[Finding]:
    """The text that prompts for the MTP check, and for speed, are cut out of."""
    protocol, check = case.protocol, "prompt text"
    name = protocol.mtp.corpus
    if name in protocol.eval.corpora:
        yield not_applicable(check, f"it is the evaluation text {name}")
        return
    corpus = protocol.corpus(name)
    path = case.text(name, None)
    yield _fetched(check, corpus) if path is None else ok(check, _bytes_words(corpus, path))


def _fetched(check: str, corpus: Corpus) -> Finding:
    return warning(check, f"{corpus.name} ({corpus.size_bytes:,} bytes, sha256 {corpus.sha256[:12]}) is not on this machine; a run "
                          f"fetches it from the hub's {corpus.hub_dataset}", _FETCHED)


def _bytes_words(corpus: Corpus, path: Path) -> str:
    return f"{path}: {corpus.size_bytes:,} bytes, sha256 {corpus.sha256[:12]}"


def _effective_articles(evaluation: Evaluation) -> float:
    return float(group_by(evaluation.articles).n_effective)


def expected_tokens(case: Case, corpus: Corpus) -> int | None:
    """How many tokens a text has if it is like the evaluation text; None where that one is not cut."""
    try:
        evaluation = case.evaluation(case.protocol.eval.corpora[0])
    except Unknown:
        return None
    if evaluation is None or not evaluation.text:
        return None
    return len(evaluation.tokens) * corpus.size_bytes // len(evaluation.text)
