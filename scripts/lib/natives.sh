# The libraries on which some transports stand. Sourced by the scripts that build and test everything.

# Sets each library up under target/, and exports what builds and runs need. Sets
#   natives   the names of the libraries that are there
#   what      cargo's options for the packages that can be built with them
#   without   a text for the end of the output about those that are not there; empty if all are
set_up_natives() {
    natives=() without=
    local library settings excluded=() features=checkpoint,tls
    for library in nixl ucx fabric; do
        if settings=$("scripts/setup-$library.sh" --print); then
            eval "$settings"
            natives+=("$library")
            features+=",$library"
        else
            printf 'NOT TESTED: kv-%s, for the reason that scripts/setup-%s.sh gives above\n' "$library" "$library" >&2
            excluded+=(--exclude "kv-$library")
            without+="; kv-$library was not tested, for the reason that scripts/setup-$library.sh gave above"
        fi
    done
    # The dialects of other engines stand on NIXL.
    if has_native nixl; then features+=,interop; fi
    what=(--workspace --all-features)
    [ -z "$without" ] || what=(--workspace "${excluded[@]}" --features "$features")
}

# has_native NAME: whether this library is there.
has_native() { [[ " ${natives[*]} " == *" $1 "* ]]; }
