"""POST /v1/messages: Anthropic's shape of a conversation, served by what serves chat."""
