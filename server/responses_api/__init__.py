"""POST /v1/responses: OpenAI's newer shape of a conversation, served by what serves chat; nothing is stored."""
