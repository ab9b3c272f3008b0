"""`--measure`: the acceptance of drafts on sample prompts, and the costs of steps, on this machine.

The target answers every prompt at every temperature once. Then each draft is loaded in turn and compared with the
answers (`agreement.py`). Costs come from the calibration that the engine itself uses, made three times: the median
counts, because the machine may be busy during one of them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outpace import backends
from outpace.backends import Loaded
from outpace.backends.base import LoadedModel, Runner, Tokenizer
from outpace.bench.statistics import Estimate, ratio_of_rates
from outpace.bench.workloads import Prompt
from outpace.config import BackendName, EngineConfig, SamplingParams
from outpace.core import Request
from outpace.errors import ModelError, UsageError
from outpace.models.prompts import ChatPrompt, encode, render
from outpace.plan.agreement import BridgedWalk, HeadWalk, Text, Walk, by_lookup, by_model, chances, walk, write_answers
from outpace.plan.drafts import PlannedDraft
from outpace.plan.guesses import Measured
from outpace.plan.models import PlannedModel
from outpace.plan.probe import Others
from outpace.speculation.costs.calibration import TARGET_BUDGET, measure_steps
from outpace.speculation.costs.curves import Costs, DraftCosts
from outpace.speculation.proposers.base import Proposer
from outpace.speculation.proposers.draft_model import DraftModelProposer
from outpace.speculation.proposers.head import HeadProposer
from outpace.speculation.proposers.ngram import NgramProposer
from outpace.speculation.proposers.other_vocabulary import OtherVocabularyProposer
from outpace.speculation.proposers.suffix import SuffixProposer

DEPTH = 8
MAX_CONTEXT = 2048
_CALIBRATIONS = 3
PATIENCE = 2.0  # times the seconds that an engine takes at its start: a large model's cost of context needs more


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of one draft at one temperature."""

    walks: tuple[Walk, ...]  # one per prompt
    is_lookup: bool = False

    @property
    def chances(self) -> tuple[float, ...]:
        return chances(self.walks, is_lookup=self.is_lookup)

    @property
    def rate(self) -> Estimate:
        """Accepted over drafted tokens, with a 95% interval over prompts."""
        accepted = [float(sum(each.accepted)) for each in self.walks]
        drafted = [float(sum(each.drafted)) for each in self.walks]
        ones = [1.0] * len(self.walks)
        return ratio_of_rates(accepted, drafted, ones, ones)

    @property
    def tokens_per_step(self) -> float:
        steps = sum(each.steps for each in self.walks)
        return 1.0 + sum(sum(each.accepted) for each in self.walks) / steps if steps else 1.0

    @property
    def match_share(self) -> float:
        steps = sum(each.steps for each in self.walks)
        return sum(each.num_drafts for each in self.walks) / steps if steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate.as_dict(),
            "chances": list(self.chances),
            "tokens_per_step": self.tokens_per_step,
            "match_share": self.match_share,
            "num_prompts": len(self.walks),
        }


@dataclass(slots=True)
class Measurement:
    """What was measured on one machine."""

    costs: Costs  # of the target alone
    drafts: dict[str, dict[float, Acceptance]]  # by the draft's name and temperature
    draft_costs: dict[str, Costs]
    taken_by_others: float = 0.0  # share of the processor time meanwhile
    is_of_machine: bool = True  # False: the plan is for another machine, so costs say nothing

    def of(self, draft: PlannedDraft, temperature: float) -> Measured | None:
        """None if this draft was not measured."""
        found = self.drafts.get(draft.name)
        if not found:
            return None
        acceptance = found[min(found, key=lambda each: abs(each - temperature))]
        rate = acceptance.rate
        interval = f", {rate.low:.0%} to {rate.high:.0%}" if rate.low is not None and rate.high is not None else ""
        return Measured(
            acceptance.chances or (0.0,),
            acceptance.match_share if draft.kind == "lookup" else 1.0,
            next(iter(self.draft_costs[draft.name].drafts.values())) if self.is_of_machine else None,
            f"{rate.value:.0%} of drafts of {DEPTH} tokens accepted{interval}, {len(acceptance.walks)} prompts",
        )


def measure_drafts(
    target: PlannedModel,
    drafts: Sequence[PlannedDraft],
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    *,
    max_tokens: int = 64,
    seed: int = 0,
    depth: int = DEPTH,
    options: dict[str, Any] | None = None,
) -> Measurement:
    """`options`: further fields of EngineConfig, such as backend and threads."""
    if target.path is None:
        raise UsageError(f"--measure runs the models, and {target.name} is only a name; give its GGUF file or folder")
    room = min(MAX_CONTEXT, target.shape.context)
    if max_tokens >= room:
        raise UsageError(f"an answer of {max_tokens} tokens leaves no room for a prompt in {room}; lower --max-tokens")
    able = [draft for draft in drafts if draft.kind in ("draft", "head", "lookup") and draft.exists
            and (draft.path is not None or draft.kind == "lookup")]  # fmt: skip
    if not able:
        raise UsageError("--measure has nothing to compare: name a draft by its file or folder, or ngram or suffix")
    found, others = Measurement(None, {}, {}), Others()  # type: ignore[arg-type]
    texts: dict[float, list[Text]] = {}
    lookups = [draft for draft in able if draft.kind == "lookup"]
    models = [draft for draft in able if draft.kind != "lookup"] or lookups[:1]
    try:
        for number, loaded in enumerate(models):
            together = [loaded, *(each for each in lookups if each != loaded)] if not number else [loaded]
            with _opened(target, loaded, options or {}) as models_here:
                texts = texts or _answers(models_here.target, prompts, temperatures, max_tokens, seed)
                _measure(found, models_here, together, texts, depth)
    except KeyboardInterrupt:
        if not found.draft_costs:
            raise
        print("interrupted: the report has what was measured before", file=sys.stderr)
    found.taken_by_others = others.share()
    return found


def _measure(
    found: Measurement, loaded: Loaded, drafts: Sequence[PlannedDraft], texts: dict[float, list[Text]], depth: int
) -> None:
    """Add the acceptance and the costs of drafts that one loading of the target serves."""
    proposers = {draft.name: _proposer(loaded, draft) for draft in drafts}
    drafted, scratch, calibrations = _Drafted(), next(iter(texts.values()))[0].request(), list[Costs]()
    accepted: dict[str, dict[float, Acceptance]] = {draft.name: {} for draft in drafts}
    walks = [(draft, temperature) for draft in drafts for temperature in texts]
    for i, (draft, temperature) in enumerate(walks):
        if i in (0, len(walks) // 2):
            calibrations.append(calibrated(loaded.target.runner, proposers.values(), scratch))
        along = _along(loaded, draft, proposers[draft.name], texts[temperature], depth, drafted)
        accepted[draft.name][temperature] = Acceptance(tuple(along), draft.kind == "lookup")
    while len(calibrations) < _CALIBRATIONS:
        calibrations.append(calibrated(loaded.target.runner, proposers.values(), scratch))
    found.costs = costs = median_costs(calibrations)
    found.drafts |= accepted
    for name, proposer in proposers.items():
        theirs = costs.drafts[proposer.name]
        if isinstance(proposer, OtherVocabularyProposer):
            theirs.draw_seconds = drafted.beside_passes(theirs)
        found.draft_costs[name] = replace(costs, drafts={proposer.name: theirs})


def calibrated(runner: Runner, proposers: Iterable[Proposer], scratch: Request) -> Costs:
    """As the engine calibrates at its start, with more time for models. It uses the runner's sequences."""
    costs = Costs(measure_steps(runner, PATIENCE * TARGET_BUDGET))
    for proposer in proposers:
        if isinstance(proposer, DraftModelProposer):
            costs.drafts[proposer.name] = proposer.measure_costs(scratch, PATIENCE)
        else:
            costs.drafts[proposer.name] = proposer.measure_costs(scratch)
    return costs


def median_costs(calibrations: Sequence[Costs]) -> Costs:
    """Of every figure: a calibration takes seconds, in which another program can make it several times too slow."""
    return Costs.from_dict(_medians([each.as_dict() for each in calibrations]))


def _medians(values: Sequence[Any]) -> Any:
    """Of nested dictionaries; of figures that not all have, the median of those that do."""
    known = [each for each in values if each is not None]
    if not known or isinstance(known[0], bool):
        return known[0] if known else None
    if not isinstance(known[0], dict):
        return statistics.median(known)
    keys = dict.fromkeys(key for each in known for key in each)
    return {key: _medians([each[key] for each in known if key in each]) for key in keys}


@dataclass(slots=True)
class _Drafted:
    """The time of drafts over a bridge, which takes more than the passes that a calibration measures."""

    seconds: float = 0.0
    num_drawn: int = 0

    def beside_passes(self, costs: DraftCosts) -> float:
        """For each draft token."""
        assert costs.passes is not None
        return max(0.0, self.seconds / self.num_drawn - costs.passes.seconds(1, 1)) if self.num_drawn else 0.0


@contextmanager
def _opened(target: PlannedModel, draft: PlannedDraft, options: dict[str, Any]) -> Iterator[Loaded]:
    """The target, with the draft as its head or beside it."""
    assert target.path is not None
    path = draft.path
    settings = {"max_context": min(MAX_CONTEXT, target.shape.context), **options}
    config = EngineConfig(model=str(target.path), draft=str(path) if path is not None else None, **settings)
    loaded = backends.load(config, target.path, path)
    try:
        if draft.kind == "head" and loaded.target.runner.capabilities.head is None:
            raise ModelError(f"the head {draft.name} was not loaded; this backend cannot use it")
        yield loaded
    finally:
        loaded.target.runner.close()
        if loaded.draft is not None:
            loaded.draft.runner.close()


def _answers(
    model: LoadedModel, prompts: Sequence[Prompt], temperatures: Sequence[float], max_tokens: int, seed: int
) -> dict[float, list[Text]]:
    from tqdm import tqdm

    tokenizer, room = model.tokenizer, model.runner.capacity.max_context
    encoded = [encode(tokenizer, _prompt(tokenizer, prompt)) for prompt in prompts]
    fitting = [tokens for tokens in encoded if len(tokens) + max_tokens <= room]
    if not fitting:
        raise UsageError(
            f"every prompt is longer than {room - max_tokens} tokens; use shorter ones, or lower --max-tokens"
        )
    total = len(fitting) * len(temperatures)
    with tqdm(
        desc="The target answers", total=total, unit="prompt", leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        texts = {}
        for temperature in temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
            texts[temperature] = [
                Text(tokens, replace(params, seed=seed + i), tokenizer.end_ids) for i, tokens in enumerate(fitting)
            ]
            write_answers(model.runner, texts[temperature], bar.update)
    return texts


def _prompt(tokenizer: Tokenizer, prompt: Prompt) -> str | ChatPrompt:
    """As a conversation, or as a text to continue for a model without a chat template."""
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in prompt.messages)
    return render(tokenizer, prompt.messages)


def _along(
    loaded: Loaded, draft: PlannedDraft, proposer: Proposer, texts: Sequence[Text], depth: int, drafted: _Drafted
) -> Iterator[Walk]:
    """The walks of a draft along all texts."""
    from tqdm import tqdm

    runner = loaded.target.runner
    at: HeadWalk | BridgedWalk
    for text in tqdm(
        texts, desc=f"Comparing {draft.name}", unit="prompt", leave=False, disable=not sys.stderr.isatty()
    ):
        if draft.kind == "lookup":
            yield walk(text, depth, by_lookup(proposer, text))
            continue
        if loaded.draft is not None and not loaded.has_other_vocabulary:
            yield walk(text, depth, by_model(loaded.draft.runner, text))
            continue
        if isinstance(proposer, OtherVocabularyProposer):
            at = BridgedWalk(proposer, text)
        else:
            assert runner.capabilities.head is not None
            at = HeadWalk(runner, runner.capabilities.head, text)
        try:
            yield walk(text, depth, at)
        finally:
            at.close()
        if isinstance(at, BridgedWalk):
            drafted.seconds += at.seconds
            drafted.num_drawn += at.num_drawn


def _proposer(loaded: Loaded, draft: PlannedDraft) -> Proposer:
    if draft.kind == "lookup":
        unset = EngineConfig()
        if draft.name == "suffix":
            return SuffixProposer(unset.suffix_store_tokens)
        return NgramProposer(unset.ngram_min, unset.ngram_max)
    target = loaded.target.runner
    verifier = target.capabilities.verifier
    if loaded.draft is not None and loaded.has_other_vocabulary:
        return OtherVocabularyProposer(loaded.draft, loaded.target.tokenizer, target.vocab_size, verifier)
    if loaded.draft is not None:
        return DraftModelProposer(loaded.draft, target.vocab_size, verifier)
    assert target.capabilities.head is not None
    return HeadProposer(target, target.capabilities.head)


def saved_costs(target: Path, draft: Path | None, threads: int | None) -> Costs | None:
    """Costs that an engine measured and kept on this machine, for these models; None if there are none."""
    from outpace.models.embedded import cache_dir
    from outpace.speculation.costs.file import CostFile

    config = EngineConfig(model=str(target), draft=str(draft) if draft is not None else None, threads=threads)
    backends_here: tuple[BackendName, ...] = ("native", "llamacpp")
    for backend in backends_here:
        resolved = config.resolve(
            model_context=1 << 24, model_path=str(target), draft_path=config.draft, backend=backend
        )  # fmt: skip
        file = CostFile.for_config(resolved, cache_dir())
        if file.path.is_file():
            return file.load()
    return None
