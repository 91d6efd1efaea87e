"""Plan search: the best file for a byte budget, proposed on measured costs and committed only when it is proven.

    search chunks     what each group of tensors costs at each type (`sensitivity`), plans for all budgets (`search_allocate`)
    selection chunks  whole plans beside each other and the incumbent; one chain of plans is proposed
    report chunks     proposal against incumbent under the commit rule (`search_verify`), and a second text as well

    run/search/ result.json  log.jsonl  start.json  rows/*.parquet  proposals/<hash>/<tier>.toml ...  plans/<tier>.toml ...
    run/parts/search/        one-group files and the cache of trials: may be deleted, costs time to make again

`plans/` holds what was committed: the incumbents of the next search.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.core.errors import InputError
from quantkit.core.files import require_space, sha256_json, write_atomic
from quantkit.core.stats import Floats, group_by
from quantkit.core.units import format_bytes
from quantkit.job.calibration import read_overlaps
from quantkit.job.evaluation import arithmetic_of
from quantkit.job.ladder import RunOptions, Session, importance_matrix, open_session
from quantkit.job.progress import Progress
from quantkit.job.quantize import Importances, prepare_importances
from quantkit.job.refpack_texts import TextPack
from quantkit.job.rundir import RunFolder, read_json, write_json
from quantkit.job.search_allocate import Draft, Planner
from quantkit.job.search_budget import Budget, StockPlans, Want, make_budgets
from quantkit.job.search_export import planned, write_plan
from quantkit.job.search_sets import TextSets, deal_text, open_references
from quantkit.job.search_shards import ShardStore
from quantkit.job.search_trials import TrialRunner
from quantkit.job.search_verify import Contest, Judgement, judge, read_start
from quantkit.job.sensitivity import Pair, Sensitivity, make_groups
from quantkit.measure.verdict import compare_means
from quantkit.spec.json_records import record_to_json
from quantkit.spec.plan import Plan
from quantkit.spec.plan_coverage import check_coverage
from quantkit.spec.protocol import Protocol
from quantkit.spec.search_records import Candidate, Proposal, SearchLabel, SearchReference, SearchResult

SEARCH_VERSION = 1
_INCUMBENT = "incumbent"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """A finished search: its folder, its record, and the protocol file of each proposal."""

    folder: Path
    result: SearchResult
    files: Mapping[str, Path]


def search(base_path: Path, protocol: Protocol, run_path: Path, wants: Sequence[Want], progress: Progress,
           options: RunOptions = RunOptions(), *, quick: bool = False,  # noqa: B008 - frozen
           refs: Sequence[Path] = ()) -> SearchOutcome:
    """Search plans for some budgets.

    Args:
        wants: at least one.
        quick: few chunks, and no report: the proposals stay unverified, and the report chunks unseen.
        refs: reference packs of the texts, of all of them or none: base is then not decoded for any comparison.

    Raises:
        InputError: a budget that cannot be met; a text with too few articles or chunks; a pack that does not fit.
        EngineError, EngineCrash, NoSpace: see the parts. The same call goes on where it stopped.
    """
    overlaps = None
    if options.imatrix is None:
        held = read_json(RunFolder(path=run_path).record("imatrix", "overlap"))
        overlaps = read_overlaps(protocol, options.corpus, options.calibration, held)
    with open_session(base_path, protocol, run_path, progress, options) as session:
        model = session.base.model
        packs = open_references(refs, session, quick)
        sets = deal_text(session.pool, protocol, session.base, session.evaluation.text, packs, quick=quick)
        blind = StockPlans(session.pool, model, protocol, {}).plan
        probe = blind("Q4_K_M")
        matrix, path = importance_matrix(session, [probe], overlaps)
        if matrix is None or path is None:
            raise InputError("expected an importance matrix for a mix with types below 8 bits, got none: pass one with --imatrix")
        check_coverage(probe, matrix, protocol.imatrix)
        importances = prepare_importances(path, matrix, sorted(probe.overrides()), protocol.imatrix.zero_floor)
        lengths = matrix.lengths()
        plans = StockPlans(session.pool, model, protocol, lengths)
        budgets = make_budgets(wants, plans, model, protocol)
        return _Search(session, importances, lengths, budgets, sets, packs, quick).run()


class _Search:
    """One search under way."""

    def __init__(self, session: Session, importances: Importances, lengths: Mapping[str, int], budgets: Sequence[Budget],
                 sets: TextSets, packs: Sequence[TextPack], quick: bool) -> None:
        self._session, self._importances, self._lengths, self._budgets = session, importances, lengths, budgets
        self._sets, self._packs, self._quick = sets, packs, quick
        self._protocol, self._base, self._progress = session.protocol, session.base, session.progress
        self._spec = self._protocol.search
        self._groups = make_groups(self._base.model, self._spec, lengths)
        if not self._groups:
            raise InputError(f"expected tensors that a plan decides on in {self._base.path}, found none for search.types: choose "
                             "other types, or another base")
        self._folder = session.run.path / "search"
        key = {"base": self._base.sha256, "imatrix": importances.sha256, "zero_floor": self._protocol.imatrix.zero_floor,
               "settings": dataclasses.asdict(session.evaluation.settings), "build": dataclasses.asdict(session.evaluation.build),
               "offload": dataclasses.asdict(session.evaluation.offload)}
        scratch = session.run.parts / "search"
        of_files = sha256_json({**key, "groups": {g.name: list(g.tensors) for g in self._groups.values()}})[:16]
        self._store = ShardStore(scratch / of_files, self._base.model.header, {g.name: g.tensors for g in self._groups.values()})
        self._runner = TrialRunner(session.pool, self._base, self._store, session.evaluation.settings,
                                   session.evaluation.offload, key, scratch, self._progress)
        self._sensitivity = Sensitivity(session.pool, self._base, self._groups, self._spec.weights_types, importances, self._store,
                                        self._runner, sets.search, scratch, self._progress)
        self._search_id = sha256_json({
            **key, "version": SEARCH_VERSION, "protocol_id": self._protocol.protocol_id, "quick": quick,
            "budgets": [[b.name, b.tensor_bytes] for b in budgets], "search": list(sets.search.chunks),
            "select": list(sets.select.chunks), "report": list(sets.report.chunks), "tokens": sets.search.tokens_sha256,
            **({"refs": [text.sha256 for text in packs]} if packs else {})})

    def run(self) -> SearchOutcome:
        """All phases; each proposal's files are written whatever its label."""
        self._announce()
        self._store.write_base()
        incumbents = self._incumbents()
        planner = Planner(self._sensitivity, self._spec, self._progress)
        drafts = planner.draft(self._budgets)
        candidates, chain = self._select(drafts, incumbents)
        chosen = {b.name: next(d for d in drafts[b.name] if d.chain == chain) for b in self._budgets}
        whole = self._runner.means(self._sets.search, {n: dict(d.types) for n, d in chosen.items()}, "whole plans, search chunks")
        judgements = {} if self._quick else self._judge(chosen, candidates, incumbents)
        self._runner.close()
        proposals = tuple(self._proposal(b, chosen[b.name], chain, candidates[b.name], incumbents[b.name],
                                         float(whole[b.name].kld.mean()), judgements.get(b.name)) for b in self._budgets)
        result = SearchResult(
            search_id=self._search_id, base_sha256=self._base.sha256, imatrix_sha256=self._importances.sha256,
            protocol_id=self._protocol.protocol_id, quick=self._quick, search_chunks=self._sets.search.chunks,
            select_chunks=self._sets.select.chunks, report_chunks=() if self._quick else self._sets.report.chunks,
            second_chunks=self._sets.second.chunks if self._sets.second is not None and not self._quick else (),
            n_trials=self._sensitivity.n_measured, n_pairs=sum(len(g.types) for g in self._groups.values()),
            prediction_error=self._sensitivity.prediction_error(), groups=tuple(self._groups.values()),
            costs=self._sensitivity.costs(), proposals=proposals,
            arithmetic=arithmetic_of(self._session.evaluation.build, self._session.evaluation.offload),
            references=tuple(map(_reference, self._packs)))
        write_json(self._folder / "result.json", record_to_json(result))
        return SearchOutcome(folder=self._folder, result=result, files=self._write_plans(proposals))

    def _announce(self) -> None:
        """What this will cost, before it starts."""
        n_pairs = sum(len(g.types) for g in self._groups.values())
        sizes = [self._sensitivity.size(Pair(g.name, t)) for g in self._groups.values() for t in g.types]
        base_bytes = self._base.model.header.file_bytes
        n_bytes = 2 * base_bytes + sum(sizes)
        require_space(self._session.run.path, n_bytes, "the files of the trials")
        sets = self._sets
        seconds = self._runner.time_base(sets.search)
        n_workers = len(self._session.pool.workers)
        n_least, n_chunk = sum(min(2, len(g.types)) for g in self._groups.values()), len(sets.search.chunks)
        cost = f"a trial takes {n_chunk} chunks of a pass; base is not decoded, so how long that is shows with the first"
        if seconds is not None:
            per_trial = seconds * n_chunk
            low, high = (n * per_trial / n_workers for n in (n_least, n_pairs))
            cost = (f"a trial of {n_chunk} chunks takes about {per_trial:.2f} s of a worker, all of them {low:.0f} s to {high:.0f} "
                    f"s with {n_workers}")
        self._progress.note(
            f"search: {len(self._groups)} groups, {n_pairs} pairs of group and type, of which at least {n_least} are measured; "
            f"{cost}; their files take at most {format_bytes(n_bytes)}")

    def _incumbents(self) -> dict[str, dict[str, str]]:
        """Tensor types of the plan that each budget's proposal must beat; {} where none fits."""
        started = read_start(self._folder / "start.json", self._search_id)
        if started is None:
            started = {}
            for budget in self._budgets:
                held = read_json(self._folder / "plans" / f"{budget.name}.json")
                if isinstance(held, dict) and held.get("base_sha256") == self._base.sha256:
                    started[budget.name] = held["types"]
                elif budget.has_incumbent:
                    started[budget.name] = {row.name: row.type for row in budget.stock.rows}
                else:
                    started[budget.name] = {}
                    self._progress.note(f"{budget.name}: no mix of llama.cpp fits {budget.tensor_bytes} bytes: nothing to beat")
            write_json(self._folder / "start.json", {"search_id": self._search_id, "incumbents": started})
        grouped = {name for g in self._groups.values() for name in g.tensors}
        like = {t.name: t.type.name for t in self._base.model.header.tensors}
        wanted: dict[str, list[str]] = {}
        for types in started.values():
            for name in grouped & types.keys():
                if types[name] != like[name]:
                    wanted.setdefault(types[name], []).append(name)
        self._sensitivity.prepare([t for t in self._spec.types if t in wanted], wanted)
        return {name: dict(types) for name, types in started.items()}

    def _kinds(self, types: Mapping[str, str]) -> dict[str, str]:
        """A plan of tensors as kinds of groups."""
        return {g.name: self._store.mix(g.name, types) for g in self._groups.values()}

    def _select(self, drafts: Mapping[str, Sequence[Draft]],
                incumbents: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, list[Candidate]], str]:
        """Measure all candidates on the selection chunks; the chain with the lower mean ln KLD over the budgets is proposed."""
        trials = {f"{b.name} {d.chain}": dict(d.types) for b in self._budgets for d in drafts[b.name]}
        trials |= {f"{b.name} {_INCUMBENT}": self._kinds(incumbents[b.name]) for b in self._budgets if incumbents[b.name]}
        means = self._runner.means(self._sets.select, trials, "whole plans, selection chunks")
        chains = [d.chain for d in drafts[self._budgets[0].name]]
        chain = min(chains, key=lambda c: sum(math.log(max(float(means[f"{b.name} {c}"].kld.mean()), 1e-300))
                                              for b in self._budgets))
        found: dict[str, list[Candidate]] = {}
        for budget in self._budgets:
            plans = {d.chain: (d.types, self._plan(budget, d.types).tensor_bytes, d.allocation.cost) for d in drafts[budget.name]}
            if incumbents[budget.name]:
                own = incumbents[budget.name]
                plans[_INCUMBENT] = (own, planned(budget.stock, budget.name, own).tensor_bytes, 0.0)
            klds = {name: means[f"{budget.name} {name}"].kld for name in plans}
            verdicts = self._verdicts(klds, chain)
            found[budget.name] = [
                Candidate(name=name, types=types, tensor_bytes=tensor_bytes, predicted_kld=predicted,
                          kld=float(klds[name].mean()), verdict=verdicts[name])
                for name, (types, tensor_bytes, predicted) in plans.items()]
        return found, chain

    def _verdicts(self, klds: Mapping[str, Floats], chosen: str) -> dict[str, str]:
        """What each candidate is against the chosen one, from paired chunks."""
        margin = math.log1p(self._protocol.gate.equivalence_margin)
        found = dict.fromkeys(klds, "")
        turned = {"better": "worse", "worse": "better"}
        articles = group_by(self._sets.select.articles)
        for pair in compare_means(klds, "kld", articles, margin=margin, alpha=self._protocol.gate.alpha):
            if pair.b == chosen:
                found[pair.a] = pair.verdict
            elif pair.a == chosen:
                word, comma, rest = pair.verdict.partition(",")
                found[pair.b] = turned.get(word, word) + comma + rest
        return found

    def _judge(self, chosen: Mapping[str, Draft], candidates: Mapping[str, Sequence[Candidate]],
               incumbents: Mapping[str, Mapping[str, str]]) -> dict[str, Judgement]:
        """Only what is better on the selection chunks may use up the report set."""
        contests = {}
        for budget in self._budgets:
            if not incumbents[budget.name]:
                continue
            klds = {c.name: c.kld for c in candidates[budget.name]}
            incumbent = self._kinds(incumbents[budget.name])
            if klds[chosen[budget.name].chain] < klds[_INCUMBENT] and incumbent != dict(chosen[budget.name].types):
                contests[budget.name] = Contest(incumbent, dict(chosen[budget.name].types))
        if not contests:
            return {}
        return judge(self._runner, contests, self._sets.report, self._sets.second, self._protocol, self._folder)

    def _plan(self, budget: Budget, types: Mapping[str, str]) -> Plan:
        return planned(budget.stock, budget.name, {name: types[g.name] for g in self._groups.values() for name in g.tensors})

    def _proposal(self, budget: Budget, draft: Draft, chain: str, candidates: Sequence[Candidate],
                  incumbent: Mapping[str, str], search_kld: float, judged: Judgement | None) -> Proposal:
        costs = tuple(self._sensitivity.cost(Pair(group, type_)) for group, type_ in draft.types.items())
        grouped = {name for g in self._groups.values() for name in g.tensors}
        label: SearchLabel = "not verified"
        if judged is not None:
            label = judged.label
        elif incumbent and self._kinds(incumbent) == dict(draft.types):
            label = "equal to the incumbent"
        elif incumbent and not self._quick:
            label = "no progress"
        stock = {row.name: row.type for row in budget.stock.rows}
        incumbent_bytes = planned(budget.stock, "", incumbent).tensor_bytes if incumbent else 0
        return Proposal(
            tier=budget.name, ftype=budget.stock.ftype, budget_bytes=budget.tensor_bytes,
            tensor_bytes=self._plan(budget, draft.types).tensor_bytes,
            incumbent="" if not incumbent else budget.stock.ftype if incumbent == stock else "the plan committed before",
            incumbent_bytes=incumbent_bytes, choices=costs, fixed={n: t for n, t in stock.items() if n not in grouped},
            predicted_kld=sum(c.kld for c in costs), bound=draft.allocation.bound,
            unmeasured_kld=sum(c.kld for c in costs if c.source == "predicted"), monotone_loss=draft.monotone_loss,
            screen_loss=draft.screen_loss, search_kld=search_kld, candidates=tuple(candidates), chosen=chain,
            k=judged.k if judged else 0, alpha=judged.alpha if judged else 0.0,
            obligations=judged.obligations if judged else (), label=label,
            commits=judged.commits if judged else False)

    def _write_plans(self, proposals: Sequence[Proposal]) -> dict[str, Path]:
        files = {}
        for budget, proposal in zip(self._budgets, proposals, strict=True):
            plan = self._plan(budget, {c.group: c.type for c in proposal.choices})
            types = {row.name: row.type for row in plan.rows}
            folder = self._folder / "proposals" / sha256_json(types)[:12]
            files[budget.name] = write_plan(folder, self._base.model, plan, proposal, self._protocol, self._lengths)
            write_json(folder / f"{budget.name}.json", {"base_sha256": self._base.sha256, "label": proposal.label, "types": types})
            if proposal.commits:
                for ending in ("command.txt", "tensor-types.txt", "toml", "json"):  # the last is what the next search reads
                    name = f"{budget.name}.{ending}"
                    write_atomic(self._folder / "plans" / name, (folder / name).read_bytes())
        return files


def _reference(text: TextPack) -> SearchReference:
    facts = text.pack.facts
    return SearchReference(corpus=text.corpus.name, file=text.pack.path.name, sha256=text.sha256, mass=facts.mass,
                           max_ids=facts.max_ids)
