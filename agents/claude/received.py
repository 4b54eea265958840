"""One streamed answer of the Messages API, put together event by event. Torch-free.

The SDK's own helper ends a stream whose tool input is no JSON; here it becomes a mark on the call,
so that the model can be told.
"""

import json
from typing import Any

MALFORMED = "malformed_input"  # in an answer, by tool call id: what it sent instead of JSON


class Received:
    """What came so far; `complete` once the answer was."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self.partial: dict[int, str] = {}
        self.malformed: dict[str, str] = {}
        self.usage: dict[str, Any] = {}
        self.about: dict[str, Any] = {}
        self.complete = False

    def take(self, event: Any) -> None:
        """An event of the SDK's raw stream."""
        match event.type:
            case "message_start":
                self.about = {"id": event.message.id, "model": event.message.model}
                self.usage = event.message.usage.model_dump(exclude_none=True)
            case "content_block_start":
                self.content.append(event.content_block.model_dump(exclude_none=True))
            case "content_block_delta":
                self._grow(event.index, event.delta)
            case "content_block_stop":
                self._close(event.index)
            case "message_delta":
                self.usage |= event.usage.model_dump(exclude_none=True)
                self.about |= event.delta.model_dump(exclude_none=True)
            case "message_stop":
                self.complete = True

    def _grow(self, index: int, delta: Any) -> None:
        block = self.content[index]
        match delta.type:
            case "text_delta":
                block["text"] = block.get("text", "") + delta.text
            case "thinking_delta":
                block["thinking"] = block.get("thinking", "") + delta.thinking
            case "signature_delta":
                block["signature"] = delta.signature
            case "input_json_delta":
                self.partial[index] = self.partial.get(index, "") + delta.partial_json

    def _close(self, index: int) -> None:
        block = self.content[index]
        text = self.partial.pop(index, "")
        if block["type"] != "tool_use" or not text:
            return
        try:
            block["input"] = json.loads(text)
            if not isinstance(block["input"], dict):
                raise ValueError("no object")
        except ValueError:
            block["input"] = {}
            self.malformed[block["id"]] = text

    def message(self) -> dict[str, Any]:
        """The answer: `content` can be sent back as it is."""
        for index in list(self.partial):
            self._close(index)  # cut off at its limit
        return {
            **self.about,
            "content": self.content,
            "usage": self.usage,
            MALFORMED: self.malformed,
        }

    def lost_usage(self) -> dict[str, Any]:
        """What an answer that broke off may have cost: of its text at most a token a byte."""
        written = sum(len(json.dumps(block).encode()) for block in self.content)
        written += sum(len(text.encode()) for text in self.partial.values())
        counted = int(self.usage.get("output_tokens") or 0)
        return {**self.usage, "output_tokens": max(counted, written)} if self.usage else {}
