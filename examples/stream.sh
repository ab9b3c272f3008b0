#!/bin/sh
# Streams an answer with curl:  examples/stream.sh "Why is the sky blue?"
curl -sN "${OUTPACE_URL:-http://localhost:8000}/v1/chat/completions" \
    -H "content-type: application/json" -H "authorization: Bearer ${OUTPACE_KEY:-none}" \
    -d "{\"messages\": [{\"role\": \"user\", \"content\": \"${1:-Hello!}\"}], \"max_tokens\": 128, \"stream\": true}"
