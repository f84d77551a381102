"""A conversation: messages for people, token ids for the model."""

import numpy as np

from rlhf_jax.sampling import text as text_lib


class Conversation:
  """What was said; a prompt goes on from the very ids of earlier turns.

  The ids of an answer stay as they were sampled, with a stop string that ended
  it: encoded again from its text they could be others, which the policy never
  said.
  """

  def __init__(self, sampler: text_lib.Sampler):
    self._sampler = sampler
    self.messages: list[dict[str, str]] = []
    # The template does not let earlier answers stand as they were said, so that
    # all was encoded again from the text.
    self.rewritten = False
    self._prompt = np.zeros(0, np.int32)  # of the last answer
    self._answer: text_lib.Answer | None = None

  @property
  def tokens(self) -> int:
    """Length of prompt and answer of the last turn."""
    return len(self._prompt) + (len(self._answer.ids) if self._answer else 0)

  def ask(self, line: str) -> tuple[list[dict[str, str]], np.ndarray]:
    """The messages and the prompt [P] int32 if a person says `line` next.

    Nothing is remembered before `answered`.

    Raises:
      ValueError: see `Sampler.encode`; for example, it is full.
    """
    asked = [*self.messages, dict(role='user', content=line)]
    between = self._answer and self._sampler.between(asked)
    self.rewritten = self._answer is not None and between is None
    if between is None:
      return asked, self._sampler.encode(asked)
    said = list(self._answer.ids)
    # The template writes the end of a turn itself.
    policy = self._sampler.policy
    if said[-1] in policy.stop_ids and (
      said[-1] in policy.tokenizer.all_special_ids or between[:1] == said[-1:]
    ):
      said.pop()
    return asked, self._sampler.fitting([*self._prompt, *said, *between])

  def answered(
    self,
    asked: list[dict[str, str]],
    prompt: np.ndarray,
    answer: text_lib.Answer,
  ) -> None:
    """Goes on from an answer of one token or more to what `ask` gave."""
    content = self._sampler.text(answer)
    self.messages = [*asked, dict(role='assistant', content=content)]
    self._prompt, self._answer = prompt, answer
