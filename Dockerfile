# pagestream on an NVIDIA GPU.  Build: docker build -t pagestream .
# Run: docker run --gpus all -p 8000:8000 -v pagestream-cache:/home/pagestream/.cache pagestream serve <model>
# The driver comes from the host (NVIDIA container toolkit); without a GPU use docker/Dockerfile.cpu, which is smaller.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04

# A compiler and Python's headers: Triton compiles a launcher for each kernel when it is first used.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc g++ \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/venv

COPY pyproject.toml README.md LICENSE /src/
COPY server /src/server
COPY engine /src/engine
COPY kernels /src/kernels
RUN pip install /src && rm -rf /src

# Ubuntu's image has a user 1000 of its own, so ours takes the next number.
RUN useradd --create-home --uid 1001 pagestream && mkdir -p /home/pagestream/.cache && chown pagestream: /home/pagestream/.cache
USER pagestream
WORKDIR /home/pagestream
VOLUME /home/pagestream/.cache

# Every option of `pagestream serve` is also a variable; inside a container only all interfaces can be reached.
ENV PAGESTREAM_HOST=0.0.0.0 PAGESTREAM_PORT=8000
# Compiled kernels go where the volume is, since all else may be read-only.
ENV TRITON_CACHE_DIR=/home/pagestream/.cache/triton
EXPOSE 8000
HEALTHCHECK --start-period=300s --interval=10s --timeout=5s --retries=3 \
    CMD ["python3", "-m", "pagestream.server.healthcheck"]
ENTRYPOINT ["pagestream"]
CMD ["serve"]
