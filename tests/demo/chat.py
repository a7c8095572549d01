"""Talk to the router with the official OpenAI client and measure what a person would feel."""

import time
from dataclasses import dataclass, field

from openai import OpenAI

# Prompts that every run uses, so that its output can be compared with plain transformers.
SHORT_QUESTION = "What is the capital of France?"
TOPICS = (
    "harbour",
    "library",
    "orchard",
    "railway",
    "theatre",
    "market",
    "bridge",
    "museum",
    "garden",
    "school",
)


def long_document(num_sentences: int = 48) -> str:
    """A document of about 21 tokens per sentence; the default has about 1,000 tokens."""
    sentences = [
        f"In {1900 + i} the {TOPICS[i % len(TOPICS)]} of the town was opened and {3 * i + 7} people came."
        for i in range(num_sentences)
    ]
    return " ".join(sentences)


@dataclass
class Answer:
    """One chat answer as the client saw it. Times are seconds since the request was sent."""

    label: str
    sent_at_s: float = 0.0  # on the clock of `time.monotonic`
    request_id: str = ""
    mode: str = ""
    pair: str = ""
    text: str = ""
    num_chunks: int = 0
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    chunk_times_s: list[float] = field(default_factory=list)


class Chat:
    """A client of one router."""

    def __init__(self, base_url: str, model: str, timeout_s: float = 300) -> None:
        self.model = model
        self._client = OpenAI(base_url=f"{base_url}/v1", api_key="demo", timeout=timeout_s, max_retries=0)

    def ask(self, label: str, question: str, max_tokens: int = 32, slo_class: str | None = None) -> Answer:
        """Stream one greedy answer. Raises `openai.OpenAIError` when the router refuses or fails."""
        return self.ask_into(Answer(label), question, max_tokens, slo_class)

    def ask_into(
        self, answer: Answer, question: str, max_tokens: int, slo_class: str | None = None
    ) -> Answer:
        """The same; `answer` can be watched from another thread while it grows."""
        answer.sent_at_s = started = time.monotonic()
        headers = {"x-slo-class": slo_class} if slo_class else {}
        raw = self._client.chat.completions.with_raw_response.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=headers,
        )
        answer.request_id = raw.headers.get("x-request-id", "")
        answer.mode = raw.headers.get("x-phasesplit-mode", "")
        answer.pair = raw.headers.get("x-phasesplit-pair", "")
        for chunk in raw.parse():
            if chunk.usage is not None:
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.completion_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.delta.content:
                    answer.chunk_times_s.append(time.monotonic() - started)
                    answer.text += choice.delta.content
                    answer.num_chunks += 1
                answer.finish_reason = choice.finish_reason or answer.finish_reason
        answer.e2e_s = time.monotonic() - started
        answer.ttft_s = answer.chunk_times_s[0] if answer.chunk_times_s else None
        return answer


def reference_answer(model_path: str, question: str, max_tokens: int) -> str:
    """The same greedy answer by plain `transformers`, loaded from the same files."""
    import torch  # noqa: PLC0415  (slow to import; most runs of this module do not need it)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False)
    return str(tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True))
