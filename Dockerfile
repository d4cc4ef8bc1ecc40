# docker build -t quickstep .
# docker run --rm -p 8000:8000 -e QUICKSTEP_API_KEY=SECRET quickstep      the bundled model
# With `--read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges` only /cache and /tmp can be written.
# docker run --rm -p 8000:8000 -v ~/.cache/huggingface:/cache quickstep serve --host 0.0.0.0 Qwen/Qwen2.5-0.5B-Instruct
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
COPY deploy/container-requirements.txt /wheels/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /wheels/container-requirements.txt
COPY --from=build /wheels /wheels
# EXTRAS="[torch]" adds PyTorch, which is not pinned: GPUs and other models than the native kernels run.
ARG EXTRAS=""
RUN wheel=$(ls /wheels/*.whl) && pip install --no-cache-dir "${wheel}${EXTRAS}" && rm -r /wheels \
    && useradd --create-home --uid 1000 quickstep && mkdir /cache && chown quickstep /cache
USER 1000
ENV HF_HOME=/cache QUICKSTEP_CACHE_DIR=/cache/quickstep
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["quickstep"]
CMD ["serve", "--host", "0.0.0.0"]
