"""The prompts of the MTP check: pieces of a text chosen by seed, and given texts with the model's chat template applied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantkit.core.errors import InputError
from quantkit.engine.chat import ChatPrompt, chat_prompts
from quantkit.engine.pool import WorkerPool
from quantkit.job.evaluation import Subject
from quantkit.measure.sampling import Sampler, uniform
from quantkit.spec.protocol import MtpSpec

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt and where it comes from; `index` is also the stream of its sampling noise."""

    index: int
    source: str
    tokens: Tokens

    def sampler(self, spec: MtpSpec) -> Sampler:
        """The protocol's sampling with this prompt's own noise."""
        return Sampler(temperature=spec.temperature, top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p, seed=spec.seed,
                       stream=self.index)


def choose_prompts(pool: WorkerPool, spec: MtpSpec, trunk: Subject, ids: Tokens, *, add_bos: bool) -> list[Prompt]:
    """All prompts of a protocol: from the text first, then the given ones.

    Args:
        ids: the whole text's tokens; where the vocabulary adds a BOS, the first of them is that.

    Raises:
        InputError: the text is too short, or a given prompt does not fit the context.
    """
    prompts = []
    for i, start in enumerate(prompt_starts(spec, len(ids))):
        tokens = ids[start:start + spec.prompt_n_tokens].copy()
        if add_bos:
            tokens[0] = ids[0]
        prompts.append(Prompt(index=i, source=f"{spec.corpus}, token {start}", tokens=tokens))
    given: list[ChatPrompt] = pool.call("mtp prompts", chat_prompts, path=trunk.path, texts=spec.prompts) if spec.prompts else []
    for i, chat in enumerate(given):
        if not 2 <= len(chat.tokens) <= spec.n_ctx - spec.n_predict:
            raise InputError(f"mtp.prompts[{i}]: expected 2 to {spec.n_ctx - spec.n_predict} tokens (n_ctx less n_predict), got "
                             f"{len(chat.tokens)}: change the prompt or set a larger mtp.n_ctx")
        how = "with the chat template" if chat.templated else "no chat template in the model"
        prompts.append(Prompt(index=len(prompts), source=f"mtp.prompts[{i}], {how}", tokens=chat.tokens))
    return prompts


def prompt_starts(spec: MtpSpec, n_tokens: int) -> list[int]:
    """Where the prompts are cut out: one at a place of its own in each of n_prompt equal runs of the text, by seed.

    Raises:
        InputError: the text has fewer tokens than the prompts together.
    """
    if n_tokens < spec.n_prompt * spec.prompt_n_tokens:
        raise InputError(f"expected at least {spec.n_prompt} x {spec.prompt_n_tokens} tokens in {spec.corpus} for mtp.n_prompt "
                         f"prompts, got {n_tokens}: use a longer text or fewer prompts")
    if not spec.n_prompt:
        return []
    run = n_tokens / spec.n_prompt
    places = uniform(spec.seed, 0, spec.n_prompt)
    return [int(i * run + place * (run - spec.prompt_n_tokens)) for i, place in enumerate(places)]
