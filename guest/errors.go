package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"syscall"
)

// apiError is an answer of the contract: a code of its closed list, its HTTP status, and the kernel's number if one was met.
type apiError struct {
	status  int
	code    string
	message string
	errno   syscall.Errno
}

func (e *apiError) Error() string { return e.message }

func (e *apiError) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{"code": e.code, "message": e.message, "errno": int(e.errno)})
}

func fail(status int, code, format string, arguments ...any) *apiError {
	return &apiError{status: status, code: code, message: fmt.Sprintf(format, arguments...)}
}

func invalid(format string, arguments ...any) *apiError {
	return fail(400, "invalid", format, arguments...)
}

// asAPIError gives any error of a handler its code.
func asAPIError(err error) *apiError {
	var known *apiError
	if errors.As(err, &known) {
		return known
	}
	var number syscall.Errno
	errors.As(err, &number)
	status, code := errnoCode(number)
	return &apiError{status, code, err.Error(), number}
}

func errnoCode(number syscall.Errno) (status int, code string) {
	switch number {
	case syscall.ENOENT:
		return 404, "file_not_found"
	case syscall.EEXIST:
		return 409, "file_exists"
	case syscall.EISDIR:
		return 409, "is_a_directory"
	case syscall.ENOTDIR:
		return 409, "not_a_directory"
	case syscall.ENOTEMPTY:
		return 409, "directory_not_empty"
	case syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.EBUSY, syscall.ETXTBSY:
		return 403, "file_permission_denied"
	case syscall.ENAMETOOLONG, syscall.EINVAL, syscall.EILSEQ, syscall.ELOOP:
		return 422, "file_name_invalid"
	case syscall.ENXIO, syscall.ENODEV, syscall.ESPIPE:
		return 409, "file_kind_unsupported"
	case syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG:
		return 507, "disk_full"
	case syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN, syscall.ENOMEM:
		return 429, "limit_reached"
	}
	return 500, "internal"
}

// fileError says what could not be done to which path; the code comes from the kernel's number.
func fileError(verb, path string, err error) error {
	var known *apiError
	if err == nil || errors.As(err, &known) {
		return err
	}
	var number syscall.Errno
	if errors.As(err, &number) {
		err = number
	}
	return fmt.Errorf("cannot %s %s: %w", verb, path, err)
}
