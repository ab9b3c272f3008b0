"""The card of a head: what it was trained on, for how long, and how well it drafts. Markdown, for people."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.models.head_file import HeadConfig
from outpace.training.contamination import NUM_WORDS
from outpace.training.evaluate import Evaluation
from outpace.training.prepared import Prepared, Source
from outpace.training.train import Progress


@dataclass(frozen=True, slots=True)
class Facts:
    config: HeadConfig
    prepared: Prepared
    progress: Progress
    evaluation: Evaluation
    num_texts: int  # answers trained on
    num_answer_tokens: int
    answer_seconds: float
    num_own_prompts: int
    num_documents: int
    num_parameters: int
    device: str


def card(facts: Facts) -> str:
    c, p, progress = facts.config, facts.prepared, facts.progress
    lines = [
        f"# A draft head for {c.target.get('name')}",
        "",
        f"{facts.num_parameters / 1e6:.1f}M parameters, one layer, draft vocabulary of {c.draft_vocab_size:,} of "
        f"{c.vocab_size:,} tokens, taps after layers {', '.join(map(str, c.taps))}.",
        f"Trained by `outpace distill` for the target with fingerprint `{c.target.get('fingerprint')}` ({p.target}).",
        "",
        "## Training",
        "",
        f"- Device: {facts.device}",
        f"- {progress.seconds / 60:.1f} minutes, {progress.steps:,} steps, {progress.tokens:,} token passes",
        f"- {facts.num_answer_tokens:,} answer tokens in {facts.num_texts:,} answers, written by the target itself in "
        f"{facts.answer_seconds / 60:.1f} minutes, half greedy and half sampled; those of the last call, if the call "
        "resumed a training with other answers",
    ]
    if facts.num_own_prompts:
        lines.append(f"- {facts.num_own_prompts:,} more prompts were written by the target itself")
    if facts.num_documents:
        lines.append(f"- {facts.num_documents:,} more prompts are tasks about long texts made of the target's answers")
    lines += ["", "## Prompts", "", *_sources(p.sources), ""]
    dropped, kept = sum(each.num_overlapping for each in p.sources), sum(each.num_prompts for each in p.sources)
    against = ", ".join([*(each.file for each in p.held_sources), *p.excluded])
    lines += [
        f"Overlap check: {dropped:,} prompts share {NUM_WORDS} words in a row with a prompt of {against} and were "
        f"dropped; {kept:,} are left.",
        "",
        "## Held-out prompts",
        "",
        f"{facts.evaluation.num_texts} answers to {', '.join(each.file for each in p.held_sources)}. Tokens a step "
        "with greedy drafts, the target's own token included, by depth:",
        "",
        *_table(facts.evaluation),
        "",
        "Overlap of the two distributions at temperature 1, by depth: "
        + " / ".join(f"{each:.2f}" for each in facts.evaluation.overlap),
        "",
        f"The draft vocabulary covers {facts.evaluation.coverage:.1%} of the tokens of the greedy answers.",
    ]
    return "\n".join(lines) + "\n"


def _sources(sources: list[Source]) -> list[str]:
    lines = ["| file | licence | prompts | overlapping | too long | repeated |", "|---|---|---|---|---|---|"]
    for s in sources:
        lines.append(
            f"| {s.file} | {s.licence} | {s.num_prompts:,} | {s.num_overlapping:,} | {s.num_long:,} | "
            f"{s.num_repeated:,} |"
        )
    return lines


def _table(evaluation: Evaluation) -> list[str]:
    depths = range(1, 1 + max((len(row) for row in evaluation.tokens_a_step.values()), default=0))
    lines = ["| prompts | " + " | ".join(map(str, depths)) + " |", "|---" * (len(depths) + 1) + "|"]
    for name, row in evaluation.tokens_a_step.items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
    return lines
