# ckptfs: `make demo` shows it, `make test` runs everything CI runs.

GO      ?= go
BIN     := $(CURDIR)/bin
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -X github.com/ckptfs/ckptfs/cmd/internal/version.Version=$(VERSION)

.PHONY: build demo test lint unit race clients bench install man setup clean

build:
	@mkdir -p $(BIN)
	$(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/ckptfs ./cmd/metaserver ./cmd/chunkserver

# What a fresh Debian machine with Go lacks.
setup:
	@.ci/setup

demo: setup build
	$(BIN)/ckptfs demo

test: setup build
	@.ci/test

lint: setup
	golangci-lint run ./...

unit:
	$(GO) test ./...

race:
	$(GO) test -race ./...

clients: setup build
	@.ci/clients

bench: build
	@bench/run

man: build
	$(BIN)/ckptfs man --dir $(BIN)/man

PREFIX ?= /usr/local
install: build man
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)/sbin $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 0755 $(BIN)/ckptfs $(BIN)/metaserver $(BIN)/chunkserver $(DESTDIR)$(PREFIX)/bin/
	ln -sf $(PREFIX)/bin/ckptfs $(DESTDIR)/sbin/mount.fuse.ckptfs
	ln -sf $(PREFIX)/bin/ckptfs $(DESTDIR)/sbin/umount.fuse.ckptfs
	install -m 0644 $(BIN)/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1/

clean:
	rm -rf $(BIN)
