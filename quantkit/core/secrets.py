"""Secrets kept out of messages: what libraries say about a failed request may hold a token, a password or a signed address."""

from __future__ import annotations

import os
import re

HIDDEN = "***"

_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN")
_PATTERNS = (
    (re.compile(r"(?<![A-Za-z0-9_])(hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-(?=[A-Za-z0-9_-]{32}))[A-Za-z0-9_-]{16,}"),
     rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{8,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"(?<=://)[^/\s@'\"<>]+@"), f"{HIDDEN}@"),
    (re.compile(r"(?<=[?&])([A-Za-z0-9_.-]*(?:signature|token|credential|secret|key|password|sig)[A-Za-z0-9_.-]*)=[^&\s'\"<>)]+",
                re.IGNORECASE), rf"\1={HIDDEN}"),
)


def hide_secrets(text: str) -> str:
    """A text without access tokens, authorization headers, passwords in addresses and signatures of signed ones.

    A token in one of the hub's variables is hidden whatever it looks like.
    """
    for name in _TOKEN_VARIABLES:
        if len(secret := os.environ.get(name, "").strip()) >= 8:
            text = text.replace(secret, HIDDEN)
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return text
