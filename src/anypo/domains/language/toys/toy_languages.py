"""toy_languages: questions that a policy answers from one table shared by all languages, knowing each topic better in some languages than in others.

A response is one of a few symbols. Its logits are those of the question plus, on the right symbol, what the policy knows of the topic in the language
it was asked in: `skill[topic, language]` is the chance of a right answer at the start. What is learned in one language serves all of them. The raw
score is 1 for a right answer, plus an offset of the pair of languages (reference, response) and noise, as an encoder's similarity would have.
Left out: text, and topics shared by regions.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Prompt, Task

EVEN_SKILLS = (0.2, 0.32, 0.44, 0.56, 0.68, 0.8)


class LanguageTable(TabularTokens):
    """Logits [questions, 1, V] and a fixed bonus [questions, languages, V]; a context is `question * languages + language`."""

    bonus: Tensor

    def __init__(self, bonus: Float[Tensor, "Q L V"], *, scale: float = 0.0, seed: int = 0) -> None:
        questions, self.languages, vocabulary = bonus.shape
        super().__init__(questions, vocabulary, 1, scale=scale, seed=seed)
        self.register_buffer("bonus", bonus)
        self.values = nn.Parameter(torch.zeros(questions * self.languages, 1, dtype=torch.float64))

    def action_logits(self, prompt: Int[Tensor, " N"], action: Int[Tensor, "N T"]) -> Float[Tensor, "N T V"]:
        question, language = prompt // self.languages, prompt % self.languages
        return (self.logits[question] + self.bonus[question, language][:, None])[:, : action.shape[1]]

    @torch.no_grad()
    def sample(
        self, prompt: Int[Tensor, " N"], generator: torch.Generator, prefix: Tensor | None = None, temperature: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Symbols, log-probs and entropies [N,1]; a prefix of one symbol is the whole response."""
        heat = 1.0 if temperature is None else temperature[:, None]
        logits = self.pushed(self.action_logits(prompt, torch.zeros(len(prompt), 1, dtype=torch.int64))[:, 0]) / heat
        action = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        if prefix is not None and prefix.shape[1]:
            action = prefix[:, :1]
        log_probs = logits.log_softmax(-1)
        return action, log_probs.gather(-1, action), -(log_probs.exp() * log_probs).sum(-1, keepdim=True)


class ToyLanguages(TokenBandit):
    """The task. Prompts carry the columns `language` (the question's own), `reference_language` and `topics`, batches the signal
    `detected_language` (list of N)."""

    name = "toy_languages"

    def __init__(
        self, topics: int = 4, questions: int = 40, answers: int = 8, *, skills: tuple[float, ...] = EVEN_SKILLS,
        offsets: tuple[float, ...] | None = None, noise: float = 0.1, slip: float = 0.0, seed: int = 0, prompts_per_step: int = 32,
    ) -> None:  # fmt: skip
        """`skills`: in (0,1), one a language, dealt anew to the languages of every topic. `offsets`: what a response in each language adds to the
        score. `noise`: standard deviation. `slip`: chance that a response comes in the question's own language all the same.

        Raises ValueError when there is not one offset for each language.
        """
        super().__init__(topics * questions, answers, 1, seed=seed, prompts_per_step=prompts_per_step)
        generator = torch.Generator().manual_seed(seed + 2000)
        languages = len(skills)
        self.languages = tuple(f"l{i}" for i in range(languages))
        self.offsets = torch.tensor(offsets or (0.0,) * languages, dtype=torch.float64)
        if len(self.offsets) != languages:
            raise ValueError(f"{len(self.offsets)} offsets for {languages} languages; give one for each")
        dealt = torch.tensor(skills, dtype=torch.float64)
        self.skill = torch.stack([dealt[torch.randperm(languages, generator=generator)] for _ in range(topics)])  # [topics, L]
        self.topic = torch.arange(self.count) // questions
        self.own = torch.randint(languages, (self.count,), generator=generator)
        self.noise, self.slip = noise, slip
        self.language_pairs = tuple((self.languages[0], name, 1 + float(self.offsets[i]), 100.0) for i, name in enumerate(self.languages))

    def policy(self, **options: Any) -> LanguageTable:
        skill = self.skill[self.topic]
        known = (skill / (1 - skill)).log() + torch.tensor(self.vocabulary - 1.0).log()
        right = nn.functional.one_hot(self.targets[:, 0, 0], self.vocabulary).double()
        return LanguageTable(known[..., None] * right[:, None], **options)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [self._asked(prompt, self.languages[int(self.own[prompt.id])]) for prompt in super().prompts(count, rng)]

    def in_language(self, prompt: Prompt, language: str) -> Prompt:
        """The prompt with the wish for an answer in that language."""
        return prompt.but(content=prompt.id * len(self.languages) + self.languages.index(language))

    def _asked(self, prompt: Prompt, language: str) -> Prompt:
        known = {"language": language, "reference_language": self.languages[0], "topics": [f"t{int(self.topic[prompt.id])}"]}
        return self.in_language(prompt.but(columns=known), language)

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        number = len(self.languages)
        wanted = torch.tensor([p.content % number for p in prompts for _ in range(p.samples)])
        own = self.own[torch.tensor([p.id for p in prompts for _ in range(p.samples)])]
        if self.slip:
            slips = torch.rand(len(own), generator=run.generator, dtype=torch.float64) < self.slip
            wanted = torch.where(slips, own, wanted)
        heats = [p.temperature for p in prompts for _ in range(p.samples)]
        temperature = torch.tensor([h or 1.0 for h in heats], dtype=torch.float64) if any(heats) else None
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        question = torch.tensor([p.id for p in prompts])[group]
        batch = self.continue_from(question * number + wanted, group, run, temperature=temperature)
        batch.signals["prompt_id"] = question
        batch.signals["detected_language"] = [self.languages[i] for i in wanted.tolist()]
        return batch

    def continue_rows(self, batch: Batch, rows: Int[Tensor, " M"], depth: Int[Tensor, " M"], run: Run) -> Batch:
        """New endings of rows of a batch; see `anypo.task.Resumable`."""
        endings = super().continue_rows(batch, rows, depth, run)
        endings.signals["prompt_id"] = batch.signals["prompt_id"][rows]
        endings.signals["detected_language"] = [batch.signals["detected_language"][i] for i in rows.tolist()]
        return endings

    def score(self, batch: Batch, run: Run) -> Float[Tensor, " N"]:
        number = len(self.languages)
        right = batch.action[:, 0] == self.targets[batch.context // number, 0, 0]
        noise = torch.randn(len(batch), generator=run.generator, dtype=torch.float64)
        return right.double() + self.offsets[batch.context % number] + self.noise * noise

    def expected_success(self, policy: Any) -> float:
        """Exact chance of a right answer, mean over questions and all languages."""
        with torch.no_grad():
            chances = (policy.logits + policy.bonus).softmax(-1)
            target = self.targets[:, :1, :1].expand(-1, len(self.languages), 1)
            return float(chances.gather(-1, target).mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        policy: Any = run.policy
        return {"pass@1": self.expected_success(policy)}


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    toy = ToyLanguages(seed=seed, **options)
    policy = toy.policy()
    policy.learning_rate = float(toy.prompts_per_step)  # an SGD step of 1 for each prompt
    return policy, toy
