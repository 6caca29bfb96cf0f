"""Asks every model that the API lists for a few words. Runs as `helm test`."""

import json
import os
import ssl
import sys
import urllib.request

url, key = os.environ["URL"], os.environ.get("API_KEY")
# The certificate is for the name that clients use, which is another.
context = ssl._create_unverified_context()


def ask(path, body=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=300, context=context) as response:
        return json.load(response)


models = [model["id"] for model in ask("/v1/models")["data"]]
assert models, "the gateway knows no model"
for model in models:
    messages = [{"role": "user", "content": "Say hello."}]
    request = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = ask("/v1/chat/completions", request)
    assert answer["usage"]["completion_tokens"] > 0, answer
    sys.stdout.write(f"{model}: {answer['choices'][0]['message']['content']}\n")
