"""OpenAI's Responses API. A request is translated to a chat request, and its answer is written in this API's format."""
