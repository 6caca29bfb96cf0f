# The gateway. Build at the root of the project: docker build --file docker/gateway.Dockerfile --tag moebius/gateway .
ARG BUILDER=python:3.11.14-bookworm
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${BUILDER} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY docker/prune.sh docker/requirements/gateway.txt docker/
RUN python -m venv --without-pip /opt/moebius \
    && pip --python /opt/moebius/bin/python install --no-compile --no-deps --requirement docker/gateway.txt \
    && docker/prune.sh /opt/moebius/lib/python3.11/site-packages
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY services services
COPY kernels kernels
RUN pip --python /opt/moebius/bin/python install --no-deps .

FROM ${PYTHON}
RUN groupadd --gid 10001 moebius && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home moebius
COPY --from=build /opt/moebius /opt/moebius
ENV PATH=/opt/moebius/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000 8001
ENTRYPOINT ["moebius-gateway"]
