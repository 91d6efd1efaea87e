"""What a plan search leaves: the measured cost of each type of each group of tensors, and every proposal with its label.

    search/result.json        SearchResult
    search/log.jsonl          one line for each Proposal, in the order in which they were held against the report set

A cost is the mean KLD, in nats, of the base with one group of tensors at one type. Groups are single tensors unless the protocol
bands them. Bytes are padded to the alignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantkit.spec.refpack_records import PackArithmetic

CostSource = Literal["measured", "weights", "predicted"]
SearchLabel = Literal["strict progress", "complete", "no progress", "protected regression", "incomparable", "not verified",
                      "equal to the incumbent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors that are decided together, and the types that they may have, by size, largest first."""

    name: str
    tensors: tuple[str, ...]
    n_elements: int
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One type of one group.

    Attributes:
        weight_error: importance-weighted squared error of the sampled weights over their weighted square, 0 to about 1.
        kld, se: over the search chunks; se is the jackknife by article, None where it is predicted or there is one article.
        source: `measured`; `weights`: measured with the weights alone, in the base's arithmetic; `predicted` from weight_error.
    """

    group: str
    type: str
    size_bytes: int
    weight_error: float
    kld: float
    se: float | None
    source: CostSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that was compared on the selection chunks. `name` says how it came about; kld is its mean there, nats; `verdict` what
    paired chunks say of it against the proposed one, Holm over all candidates of the budget, "" for the proposed one itself.
    """

    name: str
    types: Mapping[str, str]
    tensor_bytes: int
    predicted_kld: float
    kld: float
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedObligation:
    """One protected number of incumbent and proposal; see `measure.search_stats`."""

    name: str
    incumbent: float
    proposal: float
    theta: float | None
    se: float | None
    upper: float | None
    margin: float
    p_better: float | None
    verdict: str
    n_article_needed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a search proposes for one budget, and what became of it.

    Attributes:
        tier: its name. ftype: goes into the header. budget_bytes: of all padded tensors; tensor_bytes: what the plan takes.
        incumbent: name of the plan it was held against, and incumbent_bytes; "" where none fits the budget.
        choices: of each group, with its cost. fixed: tensors that the search leaves alone, with their types.
        predicted_kld: sum of the choices' costs. bound: no plan within the budget has a smaller sum of the costs known.
        unmeasured_kld: the part of predicted_kld that is predicted from weight errors.
        monotone_loss: how much predicted KLD the order along the ladder cost, as a fraction.
        screen_loss: how much lower predicted_kld could be, as a fraction, were every cost that is predicted lower by
            `SearchResult.prediction_error`: the most that screening usually hides.
        search_kld: measured of the whole plan on the search chunks.
        candidates: compared on the selection chunks, the incumbent among them; chosen: the name of the one that is proposed.
        k, alpha: its number among all that this report set has judged, and its one-sided level; 0 where it was not verified.
        obligations: over the report chunks. label, commits: what the commit rule says.
    """

    tier: str
    ftype: str
    budget_bytes: int
    tensor_bytes: int
    incumbent: str
    incumbent_bytes: int
    choices: tuple[Cost, ...]
    fixed: Mapping[str, str]
    predicted_kld: float
    bound: float
    unmeasured_kld: float
    monotone_loss: float
    screen_loss: float
    search_kld: float
    candidates: tuple[Candidate, ...]
    chosen: str
    k: int
    alpha: float
    obligations: tuple[JudgedObligation, ...]
    label: SearchLabel
    commits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReference:
    """The reference pack that stood in base's place on a text: every KLD on it is a lower bound."""

    corpus: str
    file: str
    sha256: str
    mass: float
    max_ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A whole search.

    Attributes:
        search_id: hash of everything that it depends on.
        search_chunks, select_chunks, report_chunks: numbers of the chunks; no article is in two of the sets.
        second_chunks: of the second text, empty without one.
        n_trials, n_pairs: single-group trials that were measured; pairs of group and type there are.
        prediction_error: root mean square of ln(predicted / measured), each measured type predicted from its group's others.
        references: the packs that stood in base's place, one for each text; empty where base itself was decoded.
        arithmetic: the build and the devices that every KLD was measured with.
    """

    search_id: str
    base_sha256: str
    imatrix_sha256: str | None
    protocol_id: str
    quick: bool
    search_chunks: tuple[int, ...]
    select_chunks: tuple[int, ...]
    report_chunks: tuple[int, ...]
    second_chunks: tuple[int, ...]
    n_trials: int
    n_pairs: int
    prediction_error: float
    groups: tuple[Group, ...]
    costs: tuple[Cost, ...]
    proposals: tuple[Proposal, ...]
    arithmetic: PackArithmetic
    references: tuple[SearchReference, ...] = ()
